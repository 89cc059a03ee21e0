"""What a worker is told, the same on every cluster."""

from math import ceil
from pathlib import Path

from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.plan import RunPlan, WorkerPlan


def threads_of(plan: WorkerPlan, run: RunPlan) -> int:
    """Compute threads of a rank: what its request says, else the configuration, else one a core of this machine."""
    return plan.request.threads or run.config.cluster.threads or run.facts.cpus


def devices_of(plan: WorkerPlan, run: RunPlan, index: int, rank: int = 0) -> tuple[int, ...]:
    """Indices of a rank's devices in its pool; empty on the CPU. Replicas take turns when the pool has too few."""
    request = plan.request
    gpus = next(pool.gpus for pool in run.pools if pool.name == request.pool)
    if not gpus or not request.gpus:
        return ()
    size = ceil(request.gpus)
    first = (index * request.ranks + rank) * size
    return tuple(gpus[(first + each) % len(gpus)] for each in range(size))


def context_of(
    plan: WorkerPlan,
    run: RunPlan,
    run_dir: Path,
    index: int,
    *,
    device: str,
    rank: int = 0,
    host: Worker | None = None,
    rendezvous: str = "",
) -> WorkerContext:
    """Everything a worker is told."""
    request, config = plan.request, run.config
    return WorkerContext(
        role=request.role.name,
        replica=index,
        rank=rank,
        num_ranks=request.ranks,
        config=config,
        section=plan.section,
        targets=dict(request.targets),
        run_dir=run_dir,
        seed=config.train.seed,
        threads=threads_of(plan, run),
        device=device,
        host=host,
        rendezvous=rendezvous,
        shared_prefix=plan.shared_prefix,
        weights_kind=run.weights_kind,
        spec=request.spec,
        children=ChildProcesses(),
    )
