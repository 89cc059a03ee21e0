"""Chooses the component of each slot and the algorithms, by matching configured names with offers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config import AlgoConfig, RunConfig
from rlcore.config.peer_names import renamed_value
from rlcore.config.providers import Offer, Provider
from rlcore.contracts.components import Component
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need, Scope
from rlcore.errors import CALLED, ConfigError, PlanError, PluginError, boundary, nearest
from rlcore.errors.checks.interfaces import breaches, refuses
from rlcore.errors.checks.targets import static_problem
from rlcore.plan.catalog import remedy
from rlcore.plan.distillation import check_distillation
from rlcore.plan.planner_input import CORE, Offers, join_names
from rlcore.plan.run_plan import AlgorithmPlan, ComponentPlan
from rlcore.plan.sources import function_node

NO_CRITIC = "none"
"""The critic engine of estimators that need no values."""


@dataclass(frozen=True)
class ComponentSlot:
    """A place in the trainer that one component fills."""

    name: str
    key: str
    """The config key that names the component."""
    kind: str
    """The name of the kind of its offers."""
    chosen: Callable[[RunConfig], str]
    offers: Callable[[Offers], tuple[Offer[Component[Any]], ...]]


SLOTS = (
    ComponentSlot("agent", "rollout.agent", "agent loop", lambda c: c.rollout.agent, lambda o: o.agent_loops()),
    ComponentSlot(
        "reward", "reward.manager", "reward manager", lambda c: c.reward.manager, lambda o: o.reward_managers()
    ),
    ComponentSlot("critic", "critic.engine", "critic engine", lambda c: c.critic.engine, lambda o: o.critic_engines()),
)

ALGORITHM_KEYS: Mapping[AlgorithmKind, str] = {
    AlgorithmKind.ADVANTAGE: "algo.advantage",
    AlgorithmKind.POLICY_LOSS: "algo.policy_loss",
}


def choose_components(config: RunConfig, offers: Offers) -> dict[str, ComponentPlan]:
    """The component of each slot, by slot.

    ConfigError for a name that is not offered, PluginError for one that is offered twice.
    """
    chosen = {}
    for slot in SLOTS:
        name = slot.chosen(config)
        offered = [(offer.value.name, offer) for offer in slot.offers(offers)]
        offer = only(slot.key, name, slot.kind, offered, offers)
        section = section_of(config, offers, offer.provider)
        chosen[slot.name] = ComponentPlan(slot.name, offer.value, str(offer.provider), section)
    return chosen


def only(key: str, name: str, kind: str, offered: Sequence[tuple[str, Offer[Any]]], offers: Offers) -> Offer[Any]:
    """The one offer, called `kind`, with the name that a config key gives."""
    found = [offer for known, offer in offered if known == name]
    if len(found) > 1:
        raise PluginError(
            f"{key}={name}: offered twice, by {join_names([str(offer.provider) for offer in found])}; "
            f"one name needs one offer, so one of them has to be renamed or left out"
        )
    if not found:
        help_ = remedy(key, name, others=offers.not_enabled(f"{kind} {name}"))
        known = [known for known, _ in offered]
        raise ConfigError(
            f"{key}: no plugin offers '{name}'; {renamed_value(key, name, known) or nearest(name, known)}"
            + (help_ and f"; {help_}")
        )
    return found[0]


def check_context_class(offer: Offer[Any], interface: type[Any], kind: str) -> None:
    """PluginError unless the offered class implements `interface` and is constructed from a context alone."""
    cls = offer.value.cls
    what = f"{cls.__module__}.{cls.__qualname__}"
    with boundary(f"{offer.provider}: looking at {what}", PluginError, CALLED):
        found = list(breaches(cls, interface))
        if not found and (problem := refuses(cls, ["context"])):
            found.append(f"__init__() {problem}")
    if found:
        raise PluginError(f"{offer.provider}: offers {what} as {kind} '{offer.value.name}', but {'; '.join(found)}")


def section_of(config: RunConfig, offers: Offers, provider: Provider) -> Any:
    """The settings section that a plugin declared; None if it declared none."""
    if provider.plugin == CORE:
        return None
    declared = {offer.value.name for offer in offers.config_sections() if offer.provider == provider}
    return config.plugins.get(provider.plugin) if provider.plugin in declared else None


def choose_algorithms(config: RunConfig, offers: Offers) -> dict[str, AlgorithmPlan]:
    """The advantage estimator and the policy loss, by purpose."""
    chosen = {}
    for kind, key in ALGORITHM_KEYS.items():
        name = getattr(config.algo, key.removeprefix("algo."))
        offered = [
            (algorithm.value.name, algorithm) for algorithm in offers.algorithms() if algorithm.value.kind == kind
        ]
        offer = only(key, name, kind.replace("_", " "), offered, offers)
        problem = algorithm_problem(offer.value)
        if problem:
            raise PluginError(f"{offer.provider}: {key}={name}: {problem}")
        _check_source(config, key, offer.value, str(offer.provider))
        chosen[kind.value] = AlgorithmPlan(offer.value, str(offer.provider))
    return chosen


def _check_source(config: RunConfig, key: str, algorithm: Algorithm, provided_by: str) -> None:
    """ConfigError for an extra argument that the source shows the algorithm not to take; the probe calls it later."""
    node = function_node(algorithm.target)
    if node is None or node.args.kwarg is not None:
        return
    positional = len(node.args.posonlyargs)
    names = [parameter.arg for parameter in (*node.args.args[max(0, 1 - positional) :], *node.args.kwonlyargs)]
    arguments = getattr(config.algo, f"{key.removeprefix('algo.')}_kwargs")
    check_arguments(f"{key}_kwargs", f"{key}={algorithm.name} of {provided_by}", arguments, names)


def check_arguments(key: str, who: str, arguments: Iterable[str], names: list[str]) -> None:
    """ConfigError for the first of the arguments at `key` that is not one of the names of `who`."""
    for name in arguments:
        if name not in names:
            raise ConfigError(f"{key}.{name}: {who} has no such parameter; {nearest(name, names)}")


def algorithm_problem(algorithm: Algorithm) -> str | None:
    """A certain problem with the targets of an algorithm, found without importing them; None if there is none."""
    for name, target in (("target", algorithm.target), ("selection", algorithm.selection)):
        problem = static_problem(target, num_arguments=1) if target else None
        if problem:
            return f"its {name} '{target}': {problem}"
    return None


def check_needs(config: RunConfig, algorithms: Mapping[str, AlgorithmPlan], critic_of: str = "its plugin") -> None:
    """ConfigError or PlanError when an algorithm needs something that this run lacks, or nothing reads the run's
    critic.

    `critic_of`: the provider of the critic.
    """
    plans = list(algorithms.values())
    for plan in plans:
        _check_values(config, plan)
        _check_other_needs(config, plan.algorithm, _said_of(plan))
    check_distillation(config, algorithms)
    engine = config.critic.engine
    if engine != NO_CRITIC and not any(Need.VALUES in plan.algorithm.needs for plan in plans):
        names = join_names([_said_of(plan) for plan in plans])
        raise ConfigError(
            f"critic.engine={engine} has no effect: {names} need no values; leave {critic_of} out with its "
            f"settings and critic.engine, or set an estimator that uses values, such as algo.advantage=gae"
        )


def _said_of(plan: AlgorithmPlan) -> str:
    algorithm = plan.algorithm
    return f"{ALGORITHM_KEYS[algorithm.kind]}={algorithm.name} of {plan.provided_by}"


def _check_values(config: RunConfig, plan: AlgorithmPlan) -> None:
    if Need.VALUES in plan.algorithm.needs and config.critic.engine == NO_CRITIC:
        raise ConfigError(
            f"critic.engine={NO_CRITIC}: {_said_of(plan)} needs values, which only a critic gives; "
            f"{remedy('critic.engine') or 'choose a critic engine'}"
        )


def _check_other_needs(config: RunConfig, algorithm: Algorithm, who: str) -> None:
    if Need.REFERENCE in algorithm.needs and config.algo.kl.placement == "none":
        raise ConfigError(
            f"algo.kl.placement=none: {who} needs the reference policy; choose from: algo.kl.placement=loss, reward, "
            "advantage"
        )
    if Need.FUNCTION_SCORES in algorithm.needs:
        _check_no_sums(config.algo, who)
    schedule = config.schedule
    if Need.GREEDY_BASELINE in algorithm.needs and (schedule.stream_minibatches or schedule.max_staleness):
        raise PlanError(
            f"{who} needs a greedy sample of each prompt, which is drawn after the step's samples; found "
            f"schedule.stream_minibatches={schedule.stream_minibatches}, schedule.max_staleness="
            f"{schedule.max_staleness}; choose schedule.stream_minibatches=false and schedule.max_staleness=0"
        )
    if (Need.MINIBATCH_STATISTICS in algorithm.needs) is not bool(algorithm.selection):
        found = f"selection '{algorithm.selection}'" if algorithm.selection else "no selection"
        raise PluginError(
            f"{who}: found {found}; an algorithm needs {Need.MINIBATCH_STATISTICS} if and only if it names a selection"
        )
    _check_group(config, algorithm, who)


ON_SUMS = {
    "algo.overlong=penalty": "algo.overlong=mask, or a reward function of the length",
    "algo.kl.placement=reward": "algo.kl.placement=loss or advantage",
    "algo.dynamic_sampling=true": "algo.dynamic_sampling=false",
}
"""Settings that change or compare the sums of the functions' scores, and what to choose instead."""


def _check_no_sums(algo: AlgoConfig, who: str) -> None:
    """PlanError for a setting that works on sums, which an estimator of each function's scores does not see."""
    found = {f"algo.overlong={algo.overlong}", f"algo.kl.placement={algo.kl.placement}"}
    found.add(f"algo.dynamic_sampling={str(algo.dynamic_sampling).lower()}")
    for setting, other in ON_SUMS.items():
        if setting in found:
            raise PlanError(
                f"{setting}: {who} compares the scores of each reward function, and this setting works on their sum; "
                f"choose {other}"
            )


def _check_group(config: RunConfig, algorithm: Algorithm, who: str) -> None:
    compares = algorithm.scope is Scope.GROUP or Need.GROUP in algorithm.needs
    if compares and config.rollout.samples_per_prompt < 2:
        raise PlanError(
            f"rollout.samples_per_prompt={config.rollout.samples_per_prompt}: {who} compares the samples of a group, "
            f"so it needs at least 2"
        )
    if algorithm.kind is AlgorithmKind.ADVANTAGE and config.algo.dynamic_sampling and not compares:
        raise PlanError(
            f"algo.dynamic_sampling=true replaces groups whose rewards are all equal, but {who} compares no samples of "
            "a group, so these teach like others; choose algo.dynamic_sampling=false, or an estimator that compares "
            "them, such as algo.advantage=grpo"
        )
