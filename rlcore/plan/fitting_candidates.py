"""Layouts that shard a model over the devices of a machine: what an error may advise, if a plan with it is accepted."""

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from rlcore.config import RunConfig
from rlcore.plan.catalog import rollout_key, rollout_on_gpus
from rlcore.plan.machine_facts import Facts
from rlcore.plan.machine_times import StepLayout
from rlcore.plan.memory import CONTEXT_BYTES, training_bytes_per_parameter
from rlcore.plan.memory_limits import ACTOR_SETTINGS
from rlcore.plan.shared_device import replica_devices


@dataclass(frozen=True)
class Candidate:
    """A layout of ranks and engines."""

    ways: tuple[tuple[str, ...], ...]
    """Settings for it, by preference; of these the first that is accepted counts."""
    layouts: tuple[StepLayout, ...] = ()
    """The ranks of the policy and the engines that the settings may result in; none: the settings are about neither."""


def training_candidates(where: str, config: RunConfig, is_set: Set[str], facts: Facts) -> Iterator[Candidate]:
    """Layouts of a model that trains, or of the actor and its reference, by preference: few ranks; the run's own
    replicas; room for many rows.

    Ways to the same layout: engines with CUDA graphs, engines without, and engines where the default is to sample in
    the actor, because few rows fit.
    """
    backend = next((backend for _, backend, _ in rollout_on_gpus()), "")
    replaced = where == ACTOR_SETTINGS and (config.rollout.backend == backend or "rollout.backend" not in is_set)
    named = (f"rollout.backend={backend}", f"plugins.{rollout_key('replica_devices').split('.')[1]}={{}}")
    further = ((), (f"{rollout_key('without_graphs')}=true",), *([named] if "rollout.backend" not in is_set else []))
    for ranks in _numbers_of_ranks(where, config, facts):
        shards = (f"{where}.data_parallel={ranks}", f"{where}.sharding=fsdp2")
        own = StepLayout(ranks, config.rollout.replicas, replica_devices(config))
        yield Candidate((shards,), (own, StepLayout(ranks, ranks, embedded=True)) if where == ACTOR_SETTINGS else ())
        for engines, (replicas, devices) in _replicas(config, ranks, facts).items() if replaced else ():
            ways = tuple((*shards, *engines, *more) for more in further)
            yield Candidate(ways, (StepLayout(ranks, replicas, devices),))


def scoring_candidates(where: str, facts: Facts) -> Iterator[Candidate]:
    """Layouts of a model that only scores, whose replicas have any number of ranks: few of them first, which is the
    order of those that take equally long."""
    for ranks in range(2, facts.gpus + 1):
        yield Candidate(((f"{where}.data_parallel={ranks}", f"{where}.sharding=fsdp2"),))


def _numbers_of_ranks(where: str, config: RunConfig, facts: Facts) -> list[int]:
    """The numbers of ranks of a model that trains.

    Those of the actor share out the devices evenly, and each rank has room for its shard. A critic may have a pool and
    a size that are not the actor's, so all numbers count, those that share out the devices evenly first.
    """
    engine, usable = config.actor, facts.usable_gpu_bytes or 0
    if where != ACTOR_SETTINGS:
        return sorted(range(2, facts.gpus + 1), key=lambda ranks: facts.gpus % ranks > 0)
    found = []
    for ranks in range(max(2, engine.data_parallel), facts.gpus + 1):
        sharded = replace(engine, data_parallel=ranks, sharding="fsdp2", dp_replicate=1)
        shard = int(training_bytes_per_parameter(sharded) * (facts.parameters or 0))
        if facts.gpus % ranks == 0 and CONTEXT_BYTES + shard <= usable:
            found.append(ranks)
    return found


def _replicas(config: RunConfig, ranks: int, facts: Facts) -> dict[tuple[str, ...], tuple[int, int]]:
    """Settings for replicas of one, two, four or more devices of a node, with the numbers of replicas and of devices of
    each: on devices that the ranks leave, or on theirs."""
    on_node, layout = facts.gpus_per_node or facts.gpus, RunConfig().cluster
    stated = config.cluster.backend != layout.backend and config.cluster.layout == layout.layout
    found, devices = {}, 1
    while devices <= on_node:
        parallel = (f"{rollout_key('replica_devices')}={devices}",) if devices > 1 else ()
        for engines, more in ((facts.gpus - ranks, ()), (ranks, ("cluster.layout=colocated",) if stated else ())):
            if engines >= devices and engines % devices == 0:
                replicas = engines // devices
                found[(f"rollout.replicas={replicas}", *parallel, *more)] = replicas, devices
        devices *= 2
    return found
