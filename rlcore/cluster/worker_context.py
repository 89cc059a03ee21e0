"""Builds the contexts of clusters and workers, which are the same on every cluster."""

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from rlcore.cluster.child import ChildProcesses
from rlcore.cluster.same_software import code_of
from rlcore.contracts.clusters import ClusterContext, Deadlines, PoolPlan, WorkerPlan
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.plan import RunPlan
from rlcore.plan.device_memory import serves
from rlcore.plan.memory_limits import memory_plans


def cluster_context(plan: RunPlan, run_dir: Path, deadlines: Deadlines) -> ClusterContext:
    """The input of a cluster."""
    return ClusterContext(
        config=plan.config,
        section=plan.cluster.section,
        pools=plan.pools,
        workers=plan.workers,
        colocated_roles=plan.colocated_roles,
        weights_kind=plan.weights_kind,
        plugin_files=tuple(plugin.distribution for plugin in plan.plugins if plugin.distribution.endswith(".py")),
        cpus=plan.facts.cpus,
        gpus=plan.facts.gpus if plan.config.cluster.device == "cuda" else 0,
        run_dir=run_dir,
        deadlines=deadlines,
        memory=memory_plans(plan.config, plan.workers, plan.memory_bytes, plan.facts),
        code=code_of(plan.plugins) if plan.cluster.abilities.elsewhere else None,
    )


def devices_of(plan: WorkerPlan, pools: Sequence[PoolPlan], index: int, rank: int = 0) -> tuple[int, ...]:
    """Indices of a rank's devices in its pool; empty on the CPU. Replicas take turns when the pool has too few."""
    request = plan.request
    gpus = next(pool.gpus for pool in pools if pool.name == request.pool)
    if not gpus or not request.gpus:
        return ()
    size = ceil(request.gpus)
    first = (index * request.ranks + rank) * size
    return tuple(gpus[(first + index) % len(gpus)] for index in range(size))


def shares_device(cluster: ClusterContext, plan: WorkerPlan, index: int, rank: int) -> bool:
    """True if a rank has a device on which another role is trained or scores in turn, as a critic next to an actor.

    A server is none of these: it sleeps while they work, or keeps to its share.
    """
    own = set(devices_of(plan, cluster.pools, index, rank))
    processes = (
        (worker, replica, part)
        for worker in cluster.workers
        if worker.request.embedded_in is None and not serves(worker)
        for replica in range(worker.request.replicas)
        for part in range(worker.request.ranks)
    )
    found = (devices_of(worker, cluster.pools, replica, part) for worker, replica, part in processes)
    return sum(not own.isdisjoint(devices) for devices in found) > 1


def context_of(
    cluster: ClusterContext,
    plan: WorkerPlan,
    index: int,
    *,
    device: str,
    rank: int = 0,
    host: Worker | None = None,
    rendezvous: str = "",
) -> WorkerContext:
    """The input of a worker."""
    request = plan.request
    return WorkerContext(
        role=request.role.name,
        replica=index,
        rank=rank,
        num_ranks=request.ranks,
        config=cluster.config,
        section=plan.section,
        targets=dict(request.targets),
        run_dir=cluster.run_dir,
        seed=cluster.config.train.seed,
        threads=cluster.threads_of(plan),
        device=device,
        shares_device=shares_device(cluster, plan, index, rank) if host is None else host.context.shares_device,
        host=host,
        rendezvous=rendezvous,
        shared_prefix=plan.shared_prefix,
        skips_rows=plan.skips_rows,
        weights_kind=cluster.weights_kind,
        spec=request.spec,
        memory=cluster.memory.get(request.role.name),
        children=ChildProcesses(),
    )
