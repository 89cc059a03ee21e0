"""Starts the workers of a plan: roles on different devices at the same time, the others one after another."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rlcore.aio import all_or_none
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.activity import current_activity
from rlcore.contracts.clusters import Cluster, Deadlines, PoolPlan, ProcessUse, WorkerPlan, needs_process
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors import CALLED, PluginError, WorkerError, boundary, counted, shown
from rlcore.plan import RunPlan
from rlcore.runtime.utilization import BusyMeter

logger = logging.getLogger(__name__)

Groups = Mapping[str, WorkerGroup[Any]]
IN_PROCESS = "threads of this process"


async def start_workers(
    plan: RunPlan, run_dir: Path, limits: Deadlines, stack: AsyncExitStack, busy: BusyMeter
) -> Groups:
    """The groups of all roles in the order of the plan; `stack` closes them.

    WorkerError naming the first worker that did not start; the start of others is cancelled.
    """
    who = f"cluster '{plan.cluster.offer.name}' of {plan.cluster.provided_by}"
    with boundary(f"{who}: building it", PluginError, CALLED):
        cluster = plan.cluster.offer.cls(cluster_context(plan, run_dir, limits))
    stack.push_async_callback(_close_cluster, cluster, who)
    current_activity().enter(f"opening cluster {plan.cluster.offer.name}")  # which may wait minutes for resources
    with boundary(f"{who}: open()", WorkerError, CALLED):
        await cluster.open()
    start = _Start(cluster, who)
    await all_or_none([start.in_order(chain) for chain in start_chains(plan)])
    roles = [(worker.request.role.name, worker.offered_by) for worker in plan.workers]
    return {role: busy.metered(role, start.groups[role], offered_by) for role, offered_by in roles}


def start_chains(plan: RunPlan) -> tuple[tuple[WorkerPlan, ...], ...]:
    """The workers in chains: those of a chain start in order, and chains start at the same time.

    Roles on the same devices are one chain, because an engine measures the free memory while it starts. So are threads,
    because libraries change settings of their process while they load a model. An embedded worker follows its host. A
    cluster that does not start roles together gets one chain.
    """
    if not plan.cluster.abilities.starts_together:
        return (plan.workers,)
    hosts = {worker.request.role: worker for worker in plan.workers}
    chains: dict[str, list[WorkerPlan]] = {}
    for worker in plan.workers:
        embedded_in = worker.request.embedded_in
        host = worker if embedded_in is None else hosts[embedded_in]
        chains.setdefault(_chain(host, plan), []).append(worker)
    return tuple(map(tuple, chains.values()))


def _chain(host: WorkerPlan, plan: RunPlan) -> str:
    """The name of the chain of a worker that is not embedded."""
    request, processes = host.request, plan.cluster.abilities.processes
    if processes is ProcessUse.NONE or (processes is ProcessUse.REQUIRED and not needs_process(request, plan.config)):
        return IN_PROCESS
    return f"devices of {_devices(request.pool, plan.pools)}" if request.gpus else f"role {request.role.name}"


def _devices(pool: str, pools: Sequence[PoolPlan]) -> str:
    """The pool, or the union that has its devices."""
    return next((union.name for union in pools if pool in union.colocates), pool)


class _Start:
    """The roles of a cluster that have started, and those that are starting."""

    def __init__(self, cluster: Cluster, who: str) -> None:
        self.groups: dict[str, WorkerGroup[Any]] = {}
        self._cluster, self._who = cluster, who
        self._starting: list[str] = []

    async def in_order(self, chain: Sequence[WorkerPlan]) -> None:
        """Start the roles of a chain."""
        for worker in chain:
            role, began = worker.request.role.name, time.monotonic()
            self._starting.append(role)
            self._show()
            self.groups[role] = await self._started(worker)
            self._starting.remove(role)
            self._show()
            logger.info("%s started in %.1f s", role, time.monotonic() - began)

    async def _started(self, worker: WorkerPlan) -> WorkerGroup[Any]:
        step = f"{self._who}: start() of role '{worker.request.role.name}'"
        with boundary(step, WorkerError, CALLED):
            group = await self._cluster.start(worker)
        _check_group(group, worker, step)
        return group

    def _show(self) -> None:
        if self._starting:
            current_activity().enter(f"starting {', '.join(self._starting)}")


def _check_group(group: object, worker: WorkerPlan, who: str) -> None:
    """PluginError unless a cluster returned the requested number of replicas."""
    replicas = getattr(group, "replicas", None)
    if not isinstance(replicas, (tuple, list)) or not hasattr(group, "each"):
        raise PluginError(f"{who}: returned {shown(group)}; needs a WorkerGroup")
    if len(replicas) != worker.request.replicas:
        raise PluginError(f"{who}: returned {counted(len(replicas), 'replica')}; needs {worker.request.replicas}")


async def _close_cluster(cluster: Cluster, who: str) -> None:
    with boundary(f"{who}: close()", WorkerError, CALLED):
        await cluster.close()
