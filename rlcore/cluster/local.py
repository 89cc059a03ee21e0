"""Workers on this machine: each a thread with an event loop, or separate processes.

A worker that asks to be isolated, has several ranks, or computes on a GPU, runs in child processes; any other in a
thread of this process. Those embedded in a worker share its thread or process.
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from rlcore.cluster.host import thread_environment
from rlcore.cluster.process import ProcessBody, WorkerProcess
from rlcore.cluster.replica import ReplicaGroup
from rlcore.cluster.replica_cluster import ReplicaCluster
from rlcore.cluster.thread_workers import ThreadWorkers
from rlcore.cluster.worker_context import devices_of
from rlcore.contracts.clusters import ClusterContext, WorkerPlan, needs_process


class LocalCluster(ReplicaCluster):
    """Starts the workers of a plan on this machine, and ends them."""

    def __init__(self, context: ClusterContext) -> None:
        super().__init__(context)
        self._threads = ThreadWorkers(context)
        self._scratch = ""
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Does nothing: the machine is already there."""

    async def start(self, worker: WorkerPlan) -> ReplicaGroup[Any]:
        """The replicas of one role, set up; WorkerError naming the one that failed."""
        if self._in_processes(worker):
            return await super().start(worker)
        replicas = []
        for index in range(worker.request.replicas):
            devices = self._devices(worker, index)
            replicas.append(await self._threads.start(worker, index, f"cuda:{devices[0]}" if devices else "cpu"))
        return ReplicaGroup(replicas)

    def _in_processes(self, worker: WorkerPlan) -> bool:
        request = worker.request
        if request.embedded_in is not None:
            return self.is_launched(request.embedded_in.name)
        return needs_process(request, self.context.config)

    def device_of(self, worker: WorkerPlan, index: int, rank: int) -> str:
        """A process sees only its devices, numbered from 0."""
        return "cuda:0" if self._devices(worker, index, rank) else "cpu"

    def _devices(self, worker: WorkerPlan, index: int, rank: int = 0) -> tuple[int, ...]:
        """The devices of a replica; those of the host if it is embedded."""
        return devices_of(self.context.host_of(worker), self.context.pools, index, rank)

    async def launch(self, worker: WorkerPlan, index: int) -> ProcessBody:
        """The processes of a replica, without workers."""
        request = worker.request
        processes = []
        for rank in range(request.ranks):
            environment = thread_environment(self.context.threads_of(worker))
            devices = self._devices(worker, index, rank)
            if devices:
                environment["CUDA_VISIBLE_DEVICES"] = visible(devices)
            if request.ranks > 1:
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            name = f"{request.role.name}[{index}.{rank}]" if request.ranks > 1 else f"{request.role.name}[{index}]"
            processes.append(WorkerProcess(name, environment, rank))
        body = ProcessBody(processes, self._rendezvous() if request.ranks > 1 else "")
        await body.start()
        return body

    def _rendezvous(self) -> str:
        self._scratch = self._scratch or tempfile.mkdtemp(prefix="rlcore-ranks-")
        return f"file://{self._scratch}/{next(self._numbers)}"

    async def close(self) -> None:
        """Close every worker, the last one first, and end its thread or processes."""
        await self.close_replicas()
        await self._threads.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def visible(devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that may use these devices, numbered as this process sees them."""
    ours = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return ",".join(ours[device] if device < len(ours) else str(device) for device in devices)
