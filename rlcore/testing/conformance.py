"""Says what breaks the contract of a plugin, without starting a run."""

import sys
from dataclasses import dataclass
from typing import Any

from rlcore.algo.registry import resolve
from rlcore.errors import PluginError, RlcoreError, boundary
from rlcore.plan import Algorithm, Offer
from rlcore.plan.requests import check_class
from rlcore.plugins import Hooks, load
from rlcore.plugins.load import name_of

HEAVY = ("torch", "transformers", "accelerate", "datasets", "vllm", "ray")
"""What importing a plugin should not import: planning and `--help` would take seconds."""


@dataclass(frozen=True)
class Report:
    """What a check found."""

    subject: str
    problems: tuple[str, ...]
    """Breaches of a contract: the plugin cannot be used, or will fail later."""
    warnings: tuple[str, ...]
    """What works and should be better."""

    @property
    def ok(self) -> bool:
        """True without problems."""
        return not self.problems


def check_plugin(name_or_path: str) -> Report:
    """What is wrong with an installed plugin, or with a plugin in a .py file.

    Loads it and calls its hooks, but for the one that needs a run's requests; imports the functions it refers to, and
    calls estimators, losses and selections on a small batch. Heavy
    imports can only be seen in a process that has not done them already, so run it in a fresh one.
    """
    already = set(sys.modules)
    try:
        hooks = load([name_or_path])
        offers = _offers(hooks, name_of(name_or_path))
    except RlcoreError as error:
        return Report(name_of(name_or_path), (str(error),), ())
    provider = hooks.providers()[0]
    warnings = [
        f"{provider}: importing it imports {module}; import it inside setup() or the function that needs it"
        for module in HEAVY
        if module in sys.modules and module not in already
    ]
    if not offers and not _implements_pools(hooks):
        warnings.append(f"{provider}: offers nothing")
    problems = [problem for offer in offers for problem in _problems(offer)]
    return Report(name_of(name_or_path), tuple(problems), tuple(warnings))


def _offers(hooks: Hooks, name: str) -> list[Offer[Any]]:
    everything: list[Offer[Any]] = [
        *hooks.config_sections(),
        *hooks.reward_functions(),
        *hooks.reward_managers(),
        *hooks.critic_engines(),
        *hooks.agent_loops(),
        *hooks.algorithms(),
        *hooks.worker_classes(),
    ]
    return [offer for offer in everything if offer.provider.plugin == name]


def _implements_pools(hooks: Hooks) -> bool:
    return any("rlcore_resource_pools" in hooks.implemented(provider) for provider in hooks.providers())


def _problems(offer: Offer[Any]) -> list[str]:
    """What is wrong with one offer beyond its type."""
    value, found = offer.value, []
    try:
        if hasattr(value, "cls"):
            check_class(offer)
        if isinstance(value, Algorithm):
            _probe(offer)
        elif hasattr(value, "reference"):
            with boundary(f"{offer.provider}: '{value.name}'", PluginError):
                resolve(value.reference)
        if hasattr(value, "defaults"):
            _check_section(offer)
    except RlcoreError as error:
        found.append(str(error))
    return found


def _probe(offer: Offer[Algorithm]) -> None:
    from rlcore.algo.probe import probe  # torch

    probe(offer.value, str(offer.provider))


def _check_section(offer: Offer[Any]) -> None:
    section = offer.value
    with boundary(f"{offer.provider}: {section.type.__name__}() without arguments", PluginError):
        section.type()
