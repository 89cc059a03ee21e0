"""The cluster that the plugin offers: a thin shell, so that planning does not import Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcore import PlanError
from rlcore.cluster.kit import ReplicaCluster
from rlcore.contracts.clusters import ClusterContext, ReplicaBody, WorkerPlan

if TYPE_CHECKING:
    from rlcore_ray.session import RaySession


class RayCluster(ReplicaCluster):
    """Workers as actors, pools as placement groups, on a Ray cluster that it joins or starts on this machine."""

    def __init__(self, context: ClusterContext) -> None:
        super().__init__(context)
        self._session: RaySession | None = None

    @property
    def session(self) -> RaySession:
        """The connection to Ray, created at first use."""
        if self._session is None:
            try:
                from rlcore_ray.session import RaySession
            except ModuleNotFoundError as cause:
                if cause.name != "ray":
                    raise
                raise PlanError(
                    "cluster.backend=ray: Ray is not installed; `pip install ray`, or set cluster.backend=local"
                ) from cause
            self._session = RaySession(self.context)
        return self._session

    async def open(self) -> None:
        """Connect, and reserve the pools."""
        await self.session.open()

    def device_of(self, worker: WorkerPlan, index: int, rank: int) -> str:
        """Ray shows an actor only its own devices, so their numbers begin at 0."""
        return self.session.device_of(worker)

    async def launch(self, worker: WorkerPlan, index: int) -> ReplicaBody:
        """The actors of a replica, still empty."""
        return await self.session.launch(worker, index)

    async def close(self) -> None:
        """Close every worker, end its actors, release the pools and leave Ray. A Ray started by the run ends."""
        if self._session is None:
            return
        self._session.call_off_abort()
        await self.close_replicas()
        await self._session.close()
