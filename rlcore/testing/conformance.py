"""Finds breaches of a plugin's contract, without starting a run."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config.load import check_section
from rlcore.config.providers import ConfigSection, Offer, Provider
from rlcore.contracts.clusters import Cluster, ClusterOffer
from rlcore.contracts.offers import Algorithm, AlgorithmKind, RewardFunction, WorkerClass
from rlcore.contracts.prompt_orders import PromptOrder, PromptOrderOffer
from rlcore.contracts.tracking import Tracker, TrackerOffer
from rlcore.errors import CALLED, PluginError, RlcoreError, boundary
from rlcore.imports import import_target
from rlcore.plan.catalog import libraries
from rlcore.plan.components import algorithm_problem, check_context_class
from rlcore.plan.planner_input import join_names
from rlcore.plan.requests import check_class
from rlcore.plan.reward_functions import no_reward_function
from rlcore.plan.time_limit import limited
from rlcore.plugins import Hooks, load
from rlcore.plugins.enabled import name_of
from rlcore.reward.signature import COMPUTE_SCORE_NAMES, TRL_NAMES, is_factory, read_signature

HEAVY = ("torch", "transformers", "accelerate", "datasets", *libraries())
"""Modules that a plugin should not import when it is imported: planning and `--help` would take seconds."""

SAMPLE_NAMES = frozenset({"trajectory", "trajectories", *TRL_NAMES, *COMPUTE_SCORE_NAMES})
"""Parameters that get a part of a sample. A function's other parameters are columns of the data, or `kwargs`."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    subject: str
    problems: tuple[str, ...]
    """Breaches of a contract, with which the plugin cannot be used or will fail later."""
    warnings: tuple[str, ...]
    """Properties that work but should be improved."""

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems


def check_plugin(name_or_path: str) -> Report:
    """Problems and warnings of an installed plugin, or of a plugin in a .py file.

    Loads the plugin and calls its hooks, except for the one that needs a run's requests. Imports the functions that the
    offers name, and calls estimators, losses and selections on a small batch. Run it in a fresh process: it cannot see
    heavy imports that the process has done before.
    """
    return checked_hooks(name_or_path)[0]


def checked_hooks(name_or_path: str) -> tuple[Report, Hooks | None]:
    """The report of `check_plugin`, and the plugin's hooks, called once; None if loading or a hook failed."""
    already = set(sys.modules)
    try:
        hooks = load([name_or_path])
        provider = hooks.providers()[0]
        installed = hooks.rewards_of(provider)
        offers = [*_offers(hooks, name_of(name_or_path)), *installed]
    except RlcoreError as error:
        return Report(name_of(name_or_path), (str(error),), ()), None
    warnings = [
        f"{provider}: importing it imports {module}; import it inside setup() or the function that needs it"
        for module in HEAVY
        if module in sys.modules and module not in already
    ]
    if not offers and not _implements_pools(hooks):
        warnings.append(f"{provider}: offers nothing")
    problems = [problem for offer in offers for problem in _problems(offer)] + _clashes(hooks, provider)
    problems += [
        f"{offer.provider}: reward function '{offer.value.name}' is also offered by {other.provider}, which has "
        "the name in every run that enables it; choose another name"
        for offer in installed
        for other in hooks.reward_functions()
        if other.value.name == offer.value.name
    ]
    return Report(name_of(name_or_path), tuple(problems), tuple(warnings)), hooks


def _offers(hooks: Hooks, name: str) -> list[Offer[Any]]:
    everything: list[Offer[Any]] = [
        *hooks.config_sections(),
        *hooks.reward_functions(),
        *hooks.reward_managers(),
        *hooks.critic_engines(),
        *hooks.agent_loops(),
        *hooks.algorithms(),
        *hooks.worker_classes(),
        *hooks.clusters(),
        *hooks.trackers(),
        *hooks.prompt_orders(),
    ]
    return [offer for offer in everything if offer.provider.plugin == name]


def _clashes(hooks: Hooks, provider: Provider) -> list[str]:
    """Names with two offers, both of the plugin or one of the core: a configuration could choose neither."""
    kinds: tuple[tuple[str, Sequence[Offer[Any]]], ...] = (
        ("reward function", hooks.reward_functions()),
        ("reward manager", hooks.reward_managers()),
        ("critic engine", hooks.critic_engines()),
        ("agent loop", hooks.agent_loops()),
        ("tracker", hooks.trackers()),
        ("prompt order", hooks.prompt_orders()),
        *((kind.replace("_", " "), [algorithm for algorithm in hooks.algorithms() if algorithm.value.kind == kind])
          for kind in AlgorithmKind),
    )  # fmt: skip
    found = []
    for kind, offers in kinds:
        by_name: dict[str, list[str]] = {}
        for offer in offers:
            by_name.setdefault(offer.value.name, []).append(str(offer.provider))
        for name, whose in by_name.items():
            if len(whose) > 1 and str(provider) in whose:
                others = join_names(whose)
                found.append(f"{provider}: {kind} '{name}' is offered twice, by {others}; one name needs one offer")
    return found


def _implements_pools(hooks: Hooks) -> bool:
    return any("rlcore_resource_pools" in hooks.implemented(provider) for provider in hooks.providers())


def _problems(offer: Offer[Any]) -> list[str]:
    """The problems of one offer beyond its type."""
    value, found = offer.value, []
    try:
        if isinstance(value, WorkerClass):
            check_class(offer)
        if isinstance(value, ClusterOffer):
            check_context_class(offer, Cluster, "cluster")
        if isinstance(value, TrackerOffer):
            check_context_class(offer, Tracker, "tracker")
        if isinstance(value, PromptOrderOffer):
            check_context_class(offer, PromptOrder, "prompt order")
        if isinstance(value, RewardFunction):
            _check_reward(offer)
        if isinstance(value, Algorithm):
            _check_algorithm(offer)
        if isinstance(value, ConfigSection):
            _check_section(offer)
    except RlcoreError as error:
        known = str(offer.provider) in str(error)
        found.append(str(error) if known else f"{offer.provider}: {error}")
    return found


def _check_reward(offer: Offer[RewardFunction]) -> None:
    """Imports the function and reads its signature, as if a configuration gave every possible entry of `kwargs`."""
    value = offer.value
    whose = f"{offer.provider}: reward function '{value.name}'"
    with boundary(whose, PluginError, CALLED), limited(whose):
        target = import_target(value.target)
    if (problem := no_reward_function(value.target)) is not None:
        raise PluginError(f"{whose}: {problem}")
    required = set(_required(target))
    if is_factory(target, dict.fromkeys(required)):
        return  # the function that it returns depends on `kwargs`
    by_sample = set() if isinstance(target, type) else required & SAMPLE_NAMES
    constants = required - by_sample if by_sample or isinstance(target, type) else set()
    read_signature(value.name, target, dict.fromkeys(constants), value.scope.value)


def _required(target: Any) -> list[str]:
    """The required parameters of a function, or of a class's constructor."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in _NAMED
    ]


def _check_algorithm(offer: Offer[Algorithm]) -> None:
    """Looks the functions up, then imports them and calls them on a small batch."""
    from rlcore.algo.probe import probe  # torch

    whose = f"{offer.provider}: {offer.value.kind.replace('_', ' ')} '{offer.value.name}'"
    problem = algorithm_problem(offer.value)
    if problem:
        raise PluginError(f"{whose}: {problem}")
    with boundary(whose, PluginError, CALLED), limited(whose):
        probe(offer.value, str(offer.provider))


def _check_section(offer: Offer[Any]) -> None:
    section = offer.value
    check_section(offer)
    whose = f"{offer.provider}: {section.type.__name__}() without arguments"
    with boundary(whose, PluginError, CALLED), limited(whose):
        section.type()
