"""A cluster whose replicas run in separate processes; a subclass starts them."""

import asyncio
import logging
from abc import abstractmethod
from typing import Any

from rlcore.aio import all_or_none
from rlcore.cluster.host import pack
from rlcore.cluster.replica import Replica, ReplicaGroup, ReplicaSupervisor
from rlcore.cluster.worker_context import context_of
from rlcore.contracts.clusters import Cluster, ClusterContext, ReplicaBody, Shipment, WorkerPlan
from rlcore.errors import WorkerError, boundary, worker_call

logger = logging.getLogger(__name__)


class ReplicaCluster(Cluster):
    """Watches replicas and restarts those that may die alone; a subclass launches their processes.

    An embedded worker is built in the processes of its host, including after a restart.
    """

    def __init__(self, context: ClusterContext) -> None:
        super().__init__(context)
        self._supervisors: dict[str, ReplicaSupervisor] = {}

    @abstractmethod
    async def launch(self, worker: WorkerPlan, index: int) -> ReplicaBody:
        """The processes of one replica, one per rank, without a worker in them; called again after each death.

        WorkerError naming the process that did not start, leaving nothing behind.
        """

    @abstractmethod
    def device_of(self, worker: WorkerPlan, index: int, rank: int) -> str:
        """`WorkerContext.device` of a rank: 'cpu', or 'cuda:N' as its process counts its devices."""

    async def start(self, worker: WorkerPlan) -> ReplicaGroup[Any]:
        """See `Cluster.start`; the replicas start at the same time."""
        replicas = [self.start_replica(worker, index) for index in range(worker.request.replicas)]
        return ReplicaGroup(await all_or_none(replicas))

    async def start_replica(self, worker: WorkerPlan, index: int) -> Replica[Any]:
        """One replica, set up."""
        role, embedded_in = worker.request.role, worker.request.embedded_in
        name = f"{role.name}[{index}]"
        supervisor = self._supervisors.get(f"{embedded_in.name}[{index}]") if embedded_in else None
        deadlines = self.context.deadlines
        if supervisor is None:
            restarts = self.context.config.cluster.max_restarts if worker.request.isolated else 0

            async def launch() -> ReplicaBody:
                return await self.launch(worker, index)

            supervisor = self._supervisors[name] = ReplicaSupervisor(name, index, launch, restarts, deadlines)
            await supervisor.start()

        def ranks(rendezvous: str) -> list[Shipment]:
            return [self._shipment(name, worker, index, rank, rendezvous) for rank in range(worker.request.ranks)]

        with worker_call(role.name, "setup", worker.offered_by):
            await supervisor.build(ranks)
        return Replica(name, role.name, role.interface, supervisor, deadlines)

    def is_launched(self, role: str) -> bool:
        """True for a role that has processes here."""
        return f"{role}[0]" in self._supervisors

    def _shipment(self, name: str, worker: WorkerPlan, index: int, rank: int, rendezvous: str) -> Shipment:
        device = self.device_of(worker, index, rank)
        context = context_of(self.context, worker, index, device=device, rank=rank, rendezvous=rendezvous)
        return pack(name, worker, context, self.context.plugin_files, self.context.code)

    async def close_replicas(self) -> None:
        """End all replicas at the same time; errors are logged."""
        supervisors = list(self._supervisors.values())
        found = await asyncio.gather(*map(_closed, supervisors), return_exceptions=True)
        for supervisor, error in zip(supervisors, found, strict=True):
            if error is not None:
                logger.warning("%s: closing it: %s", supervisor.name, error)
        self._supervisors.clear()


async def _closed(supervisor: ReplicaSupervisor) -> None:
    with boundary("its processes", WorkerError):
        await supervisor.close()
