"""Settings with which a model that exceeds its devices fits, found by planning with them: what an error advises is
accepted."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import product

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, PlanError
from rlcore.plan.catalog import rollout_key, rollout_on_gpus
from rlcore.plan.machine_facts import Facts
from rlcore.plan.memory import ACTOR_SETTINGS, CONTEXT_BYTES, DeviceMemoryError, training_bytes_per_parameter
from rlcore.plan.run_plan import RunPlan

Replan = Callable[[Sequence[str]], RunPlan]
"""Makes the plan of a run with further overrides."""


def with_settings_that_fit(
    error: DeviceMemoryError, replan: Replan, config: RunConfig, is_set: Set[str], facts: Facts
) -> PlanError:
    """The error of a refused plan, with the first settings that shard the model so that the plan is accepted, if there
    are any. `is_set`: the keys that are set by anything other than a default."""
    candidates = _candidates if error.trains else _scoring_candidates
    for candidate in candidates(error.settings, config, is_set, facts):
        settings = _accepted(replan, candidate)
        if settings:
            return error.advising(" ".join(settings))
    return error


def _accepted(replan: Replan, settings: tuple[str, ...]) -> tuple[str, ...]:
    """The settings if a plan with them is accepted, with the same shards of a second model if that needs them; else
    nothing."""
    try:
        replan(settings)
    except DeviceMemoryError as error:
        sharded = tuple(setting.replace(ACTOR_SETTINGS, error.settings, 1) for setting in settings[:2])
        return () if set(sharded) <= set(settings) else _accepted(replan, (*settings, *sharded))
    except (ConfigError, PlanError):
        return ()
    return settings


def _candidates(where: str, config: RunConfig, is_set: Set[str], facts: Facts) -> Iterator[tuple[str, ...]]:
    """Settings by preference: few ranks; the run's own replicas; room for many rows; engines with CUDA graphs."""
    backend = next((backend for _, backend, _ in rollout_on_gpus()), "")
    replaced = where == ACTOR_SETTINGS and (config.rollout.backend == backend or "rollout.backend" not in is_set)
    for ranks in _numbers_of_ranks(where, config, facts):
        shards = (f"{where}.data_parallel={ranks}", f"{where}.sharding=fsdp2")
        yield shards
        replicas = list(_replicas(config, ranks, facts)) if replaced else []
        graphs = ((), (f"{rollout_key('without_graphs')}=true",))
        yield from ((*shards, *engines, *more) for more, engines in product(graphs, replicas))
        if "rollout.backend" not in is_set:  # where the default is to sample in the actor, because few rows fit
            named = (f"rollout.backend={backend}", f"plugins.{rollout_key('replica_devices').split('.')[1]}={{}}")
            yield from ((*shards, *engines, *named) for engines in replicas)


def _scoring_candidates(where: str, config: RunConfig, is_set: Set[str], facts: Facts) -> Iterator[tuple[str, ...]]:
    """Settings for a model that only scores, whose replicas have any number of ranks: few of them."""
    yield from ((f"{where}.data_parallel={ranks}", f"{where}.sharding=fsdp2") for ranks in range(2, facts.gpus + 1))


def _numbers_of_ranks(where: str, config: RunConfig, facts: Facts) -> list[int]:
    """The numbers of ranks that share out the devices evenly, and of which each has room for its shard."""
    engine, usable = config.actor, facts.usable_gpu_bytes or 0
    found = []
    for ranks in range(max(2, engine.data_parallel if where == ACTOR_SETTINGS else 2), facts.gpus + 1):
        sharded = replace(engine, data_parallel=ranks, sharding="fsdp2", dp_replicate=1)
        shard = int(training_bytes_per_parameter(sharded) * (facts.parameters or 0))
        if facts.gpus % ranks == 0 and CONTEXT_BYTES + shard <= usable:
            found.append(ranks)
    return found


def _replicas(config: RunConfig, ranks: int, facts: Facts) -> Iterator[tuple[str, ...]]:
    """Settings for replicas of one, two, four or more devices of a node: on devices that the ranks leave, or on
    theirs."""
    on_node, layout = facts.gpus_per_node or facts.gpus, RunConfig().cluster
    stated = config.cluster.backend != layout.backend and config.cluster.layout == layout.layout
    devices = 1
    while devices <= on_node:
        parallel = (f"{rollout_key('replica_devices')}={devices}",) if devices > 1 else ()
        for engines, more in ((facts.gpus - ranks, ()), (ranks, ("cluster.layout=colocated",) if stated else ())):
            if engines >= devices and engines % devices == 0:
                yield (f"rollout.replicas={engines // devices}", *parallel, *more)
        devices *= 2
