"""`make_plan` matches offers to requests, once, before any process starts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcore.config import LoadedConfig, RunConfig
from rlcore.config.providers import Provider
from rlcore.contracts.clusters import ClusterAbilities, PoolPlan, WorkerPlan
from rlcore.contracts.model_files import model_directory
from rlcore.contracts.rollout import RolloutWorker
from rlcore.errors import PlanError
from rlcore.plan.batch_sizes import batch_sizes
from rlcore.plan.clusters import check_startable, plan_cluster
from rlcore.plan.colocation import plan_colocation
from rlcore.plan.components import check_needs, choose_algorithms, choose_components
from rlcore.plan.context_parallel import check_context
from rlcore.plan.data_parallel import check_ranks
from rlcore.plan.device_memory import DeviceRoles, memory_of_devices
from rlcore.plan.device_notes import check_device, device_notes, share_threads, thread_notes
from rlcore.plan.layout import check_one_node, lay_out, layout_notes, plan_layout
from rlcore.plan.learning_notes import learning_notes
from rlcore.plan.machine_facts import Facts
from rlcore.plan.memory import memory_estimate
from rlcore.plan.memory_limits import check_memory
from rlcore.plan.mesh import check_copies
from rlcore.plan.ordering import plan_prompt_order
from rlcore.plan.planner_input import Offers
from rlcore.plan.pools import make_pools, pool_notes
from rlcore.plan.prefixes import most_tokens, plan_shared_prefixes
from rlcore.plan.requests import check_shipped, choose_classes, gather
from rlcore.plan.reward_functions import brought_rewards, resolve_rewards
from rlcore.plan.run_plan import AlgorithmPlan, LayoutPlan, RunPlan
from rlcore.plan.schedule import plan_schedule, schedule_notes
from rlcore.plan.skipped_rows import skip_rows
from rlcore.plan.state_copies import plan_saving
from rlcore.plan.tracking import plan_trackers
from rlcore.plan.weight_sync import plan_weights, with_choice


class UnusedPluginsError(PlanError):
    """Nothing of some enabled plugins is in the plan."""

    def __init__(self, message: str, plugins: Sequence[str]) -> None:
        """`plugins`: their names."""
        self.plugins = tuple(plugins)
        super().__init__(message)


def make_plan(loaded: LoadedConfig, offers: Offers, facts: Facts, *, only_sampling: bool = False) -> RunPlan:
    """Plans the whole run; pure except for checking that named reward files exist.

    Chosen components -> their requests -> classes -> pools (the pool hook sees all requests) -> capacity. The order of
    plugins does not matter. With `only_sampling` the plan has no rewards, whose files may be gone. Raises ConfigError,
    PluginError or PlanError naming the parties.
    """
    config = loaded.config
    components = choose_components(config, offers)
    algorithms = choose_algorithms(config, offers)
    check_needs(config, algorithms, components["critic"].provided_by)
    cluster = plan_cluster(config, offers)
    check_device(config, facts, cluster.abilities)
    arithmetic = batch_sizes(config)
    rewards = () if only_sampling else resolve_rewards(loaded, offers, components["reward"])
    trackers, prompt_order = plan_trackers(config, offers), plan_prompt_order(config, offers)
    workers = choose_classes(loaded, offers, gather(config, offers, components, _targets(algorithms)))
    workers, unshared = plan_shared_prefixes(workers, facts, config.model.attention, most_tokens(config))
    workers, threads = share_threads(config, workers, facts, cluster.abilities)
    check_context(workers, facts, unshared)
    check_ranks(workers, arithmetic)
    check_shipped(workers, config, cluster.abilities)
    workers, pools, layout = _placed(config, offers, workers, facts, cluster.abilities)
    schedule = plan_schedule(config, algorithms, rewards, workers, arithmetic)
    memory = memory_estimate(config, workers, facts)
    colocated_roles = plan_colocation(config, pools, workers, schedule, memory, facts)
    check_startable(config, cluster, pools, workers)
    roles = DeviceRoles(config, pools, workers, colocated_roles, memory, facts)
    is_known = facts.of_workers or not cluster.abilities.elsewhere  # elsewhere this machine's memory does not matter
    used = _used_providers(
        (cluster, prompt_order), components.values(), algorithms.values(), workers, pools, rewards, trackers
    )
    made = RunPlan(
        loaded=loaded,
        facts=facts,
        components=components,
        cluster=cluster,
        workers=skip_rows(workers, not schedule.all_rows),
        pools=pools,
        layout=layout,
        colocated_roles=colocated_roles,
        weights_kind=plan_weights(config, workers, pools, elsewhere=facts.several_nodes or cluster.abilities.elsewhere),
        algorithms=algorithms,
        trackers=trackers,
        prompt_order=prompt_order,
        rewards=rewards,
        reward_components=() if only_sampling else brought_rewards(config, components["reward"]),
        schedule=schedule,
        batch_sizes=arithmetic,
        memory_bytes=memory,
        device_bytes=_checked_memory(roles) if is_known else {},
        choices=(*loaded.choices, *threads),
        notes=(),
        plugins=_enabled_plugins(offers, None if only_sampling else used, loaded),
    )
    return with_choice(plan_saving(replace(made, notes=_notes(made, offers, unshared))))


def _checked_memory(roles: DeviceRoles) -> dict[str, dict[str, int]]:
    """Bytes of each pool's fullest device by phase; PlanError if the host or a device has too little."""
    check_memory(roles.config, roles.workers, roles.memory, roles.facts)
    return memory_of_devices(roles)


def _notes(plan: RunPlan, offers: Offers, unshared: Sequence[str]) -> tuple[str, ...]:
    """The notes of a plan; `unshared`: notes on prompts that are computed once per sample."""
    config, facts = plan.config, plan.facts
    return (
        *_unused(offers, plan.plugins, plan.workers),
        *pool_notes(plan.pools),
        *layout_notes(config, plan.layout, plan.colocated_roles),
        *device_notes(config, facts, plan.pools, plan.choices, plan.cluster.abilities),
        *thread_notes(config, plan.workers, facts, plan.cluster.abilities),
        *_of_workers(config, facts, plan.workers),
        *unshared,
        *_unchecked(config),
        *schedule_notes(config, plan.schedule, plan.batch_sizes),
        *learning_notes(config, facts),
    )


def _targets(algorithms: Mapping[str, AlgorithmPlan]) -> dict[str, str]:
    """The chosen functions, by purpose."""
    return {purpose: plan.algorithm.target for purpose, plan in algorithms.items()}


def _placed(
    config: RunConfig, offers: Offers, workers: Sequence[WorkerPlan], facts: Facts, abilities: ClusterAbilities
) -> tuple[tuple[WorkerPlan, ...], tuple[PoolPlan, ...], LayoutPlan]:
    """The workers with their pools, the pools, and the resulting layout."""
    workers, reason = lay_out(config, workers, facts, abilities)
    pools = make_pools(config, offers, workers, facts, abilities)
    check_copies(workers, pools)
    check_one_node(workers, pools, facts)
    return workers, pools, plan_layout(config, pools, workers, reason)


def _used_providers(*chosen: Iterable[Any]) -> set[str]:
    """The providers of everything that is in the plan."""
    return {plan.provided_by for plans in chosen for plan in plans}


def _enabled_plugins(offers: Offers, used: set[str] | None, loaded: LoadedConfig) -> tuple[Provider, ...]:
    """The plugins by name; PlanError for one that contributes neither an offer nor a default in effect.

    `used`: the providers of the plan, or None if it leaves out parts of the run.
    """
    plugins = tuple(sorted(offers.providers(), key=lambda provider: provider.plugin))
    if used is None:
        return plugins
    setting = set(loaded.origins.values())
    unused = [plugin for plugin in plugins if str(plugin) not in used and f"plugin '{plugin.plugin}'" not in setting]
    if unused:
        raise UnusedPluginsError(
            f"{unused[0]} is enabled, but nothing of it is in the plan{_why_not_sampling(unused[0], offers, loaded)}; "
            f"name something it offers in the config, or leave the plugin out",
            [plugin.plugin for plugin in unused],
        )
    return plugins


def _why_not_sampling(plugin: Provider, offers: Offers, loaded: LoadedConfig) -> str:
    """The reason why this machine's default is another backend than the plugin's; empty if it offers none."""
    samples = any(
        offer.provider == plugin and issubclass(offer.value.interface, RolloutWorker)
        for offer in offers.worker_classes()
    )
    chosen = next((choice for choice in loaded.choices if choice.key == "rollout.backend" and choice.reason), None)
    return f" (rollout.backend is '{chosen.value}': {chosen.reason})" if samples and chosen else ""


def _unused(offers: Offers, plugins: Sequence[Provider], workers: Sequence[WorkerPlan]) -> list[str]:
    """Unused worker classes of plugins, by interface and backend."""
    taken = {plan.cls for plan in workers}
    notes = [
        f"unused: {offer.value.cls.__qualname__} for ({offer.value.interface.__name__}, {offer.value.backend}) "
        f"of {offer.provider}"
        for offer in offers.worker_classes()
        if offer.provider in plugins and offer.value.cls not in taken
    ]
    return sorted(notes)


def _of_workers(config: RunConfig, facts: Facts, workers: Sequence[WorkerPlan]) -> list[str]:
    """The notes of requests, and notes on unknown facts about the workers."""
    notes = [f"{worker.request.role.name}: {worker.request.note}" for worker in workers if worker.request.note]
    if facts.parameters is None:
        model = config.model
        here = model_directory(model.path, model.revision).is_dir()
        away = "" if here else f"; '{model.path}' is not a directory of this machine, so training asks the Hub for it"
        notes.append(f"unknown: the number of parameters of model.path, so memory is not estimated{away}")
    else:
        unstated = [
            w.request.role.name
            for w in workers
            if w.request.embedded_in is None and not (w.request.bytes_per_parameter or w.request.device_frac)
        ]
        if unstated:
            notes.append(f"unknown: the memory of {', '.join(sorted(unstated))}")
    cpus = sum(w.request.cpus * w.request.replicas * w.request.ranks for w in workers if w.request.embedded_in is None)
    if cpus > facts.cpus:
        notes.append(f"the workers ask for {cpus:g} CPUs, the machine has {facts.cpus}: they share them")
    return notes


def _unchecked(config: RunConfig) -> list[str]:
    if config.reward.manager == "functions" and not config.reward.functions:
        return ["no reward functions: every reward is 0, in evaluations, too"]
    if config.reward.canary:
        return []
    return ["no canary: reward.canary is empty, so the first training rewards are the first test of the reward"]
