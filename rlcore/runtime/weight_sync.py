"""Syncs the actor's weights to rollout replicas that have a copy."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.contracts.workers import ReplicaHandle, WorkerGroup
from rlcore.errors import WorkerError, worker_call
from rlcore.types import WeightsHandle

logger = logging.getLogger(__name__)

TOGETHER = ("nccl", "ipc")
"""Kinds of weights that several replicas take together."""


class WeightsSync:
    """Hands every version to every replica, and the current one to a replica that was restarted."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        directory: Path,
        deadline_s: float = 600.0,
    ) -> None:
        """`directory` is visible to the actor and all replicas, unless weights go over a connection; this object owns
        its contents. A replica that takes longer than `deadline_s` to load weights is restarted.
        """
        self._actor, self._rollout, self._directory = actor, rollout, directory
        self._deadline_s = deadline_s
        self._latest: WeightsHandle | None = None
        self._turn = asyncio.Lock()
        rollout.before_return(self._welcome)

    async def publish(self, version: int) -> None:
        """Publish the actor's weights as `version`; the replicas sample with them when this returns.

        A lost replica, or one that is restarted because it took too long, gets them before it serves again.
        WorkerError if one refuses them.
        """
        async with self._turn:
            path = self._directory / f"version_{version}"
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            handle = await self._actor.replicas[0].call(ActorWorker.weights, version, path)
            before, self._latest = self._latest, handle
            # Wait for all replicas before an error is raised, so that none is left in the middle of reading.
            living = [replica for replica in self._rollout.replicas if replica.alive]
            shared = replace(handle, members=len(living)) if handle.kind in TOGETHER else handle
            calls = [self._hand_over(replica, shared) for replica in living]
            loading = asyncio.gather(*calls, return_exceptions=True)
            try:
                await asyncio.gather(*self._sending(shared))
                errors = await loading
            finally:
                loading.cancel()  # an actor that fails sends nothing more; no effect when it is done
            for error in errors:
                if isinstance(error, BaseException):
                    raise error
            if before is not None and before.path != handle.path and not before.is_sent:
                await asyncio.to_thread(shutil.rmtree, before.path, ignore_errors=True)

    async def close(self) -> None:
        """Remove what was written."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _sending(self, handle: WeightsHandle) -> list[Awaitable[Any]]:
        """The call in which the actor sends a version to the replicas that load it; none if they fetch it."""
        if handle.kind != "ipc" or not handle.members:
            return []
        return [self._actor.replicas[0].call(ActorWorker.send_weights, handle)]

    async def _hand_over(self, replica: ReplicaHandle[RolloutWorker], handle: WeightsHandle) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                loaded = await replica.call(RolloutWorker.load_weights, handle)
        except TimeoutError:
            replica.restart(self._too_long(handle))
            return
        except WorkerError as error:
            if replica.alive:
                raise
            logger.warning("%s; it gets version %d of the weights when it serves again", error, handle.version)
            return
        _check_loaded(replica.name, loaded, handle.version)

    async def _welcome(self, replica: ReplicaHandle[Any]) -> None:
        """Called before a restarted replica serves; without an earlier sync it has read the run's initial weights.

        WorkerError when it takes too long: the next version waits until this returns.
        """
        async with self._turn:
            if self._latest is None:
                return
            handle = replace(self._latest, members=1) if self._latest.kind == "ipc" else self._latest
            try:
                async with asyncio.timeout(self._deadline_s):
                    loading = replica.call(RolloutWorker.load_weights, handle)
                    *_, loaded = await asyncio.gather(*self._sending(handle), loading)
            except TimeoutError:
                with worker_call(ROLLOUT.name, RolloutWorker.load_weights.__name__):
                    raise WorkerError(f"{replica.name}: {self._too_long(self._latest)}") from None
            _check_loaded(replica.name, loaded, self._latest.version)

    def _too_long(self, handle: WeightsHandle) -> str:
        return (
            f"it took longer than rollout.weights_deadline_s={self._deadline_s:g} to load version {handle.version} of "
            "the weights"
        )


def _check_loaded(name: str, loaded: int, version: int) -> None:
    """WorkerError where a replica does not sample with the version that it got."""
    if loaded != version:
        with worker_call(ROLLOUT.name, RolloutWorker.load_weights.__name__):
            raise WorkerError(
                f"{name}: says that it samples with version {loaded} of the weights after version {version} was handed "
                "over"
            )
