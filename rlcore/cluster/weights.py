"""How the actor's weights reach rollout replicas that hold a copy of their own."""

import asyncio
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from rlcore.actor import ActorWorker
from rlcore.errors import WorkerError
from rlcore.rollout import RolloutWorker
from rlcore.types import WeightsHandle
from rlcore.workers import ReplicaHandle, WorkerGroup

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""Between two looks whether a replica has come for its weights."""


class WeightsSync(ABC):
    """Hands every version to every replica, and the current one to a replica that was restarted."""

    def __init__(self, actor: WorkerGroup[ActorWorker], rollout: WorkerGroup[RolloutWorker]) -> None:
        self._actor, self._rollout = actor.replicas[0], rollout
        self._turn = asyncio.Lock()
        rollout.before_return(self._welcome)

    @abstractmethod
    async def publish(self, version: int) -> None:
        """The replicas sample with the actor's weights, named `version`, when this returns.

        A replica that is being restarted gets them before it serves again. WorkerError when one refuses them.
        """

    async def close(self) -> None:
        """Leave nothing behind."""

    @abstractmethod
    async def _welcome(self, replica: ReplicaHandle[Any]) -> None:
        """Before a restarted replica serves; without a sync so far it has read the weights that the run began with."""


class WeightsFiles(WeightsSync):
    """By way of a directory, which all replicas read at the same time."""

    def __init__(self, actor: WorkerGroup[ActorWorker], rollout: WorkerGroup[RolloutWorker], directory: Path) -> None:
        """`directory` is seen by the actor and by all replicas; what is in it belongs to this object."""
        super().__init__(actor, rollout)
        self._directory = directory
        self._latest: WeightsHandle | None = None

    async def publish(self, version: int) -> None:
        async with self._turn:
            path = self._directory / f"version_{version}"
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            handle = await self._actor.call(ActorWorker.weights, version, path)
            before, self._latest = self._latest, handle
            # All have taken or refused them before an error is raised: none is left in the middle of reading.
            calls = [_unless_lost(replica, version, _take_up(replica, handle)) for replica in self._rollout.replicas]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error
            if before is not None and before.path != handle.path:
                await asyncio.to_thread(shutil.rmtree, before.path, ignore_errors=True)

    async def close(self) -> None:
        """Remove what was written."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _welcome(self, replica: ReplicaHandle[Any]) -> None:
        async with self._turn:
            if self._latest is not None:
                await _take_up(replica, self._latest)


class WeightsLink(WeightsSync):
    """From the actor's process to those of one replica after the other: one that is lost meanwhile harms no other."""

    def __init__(self, actor: WorkerGroup[ActorWorker], rollout: WorkerGroup[RolloutWorker]) -> None:
        super().__init__(actor, rollout)
        self._version: int | None = None
        self._published = asyncio.Event()
        """The version after the current one; a new event for each."""

    async def publish(self, version: int) -> None:
        async with self._turn:
            self._version = version
            for replica in self._rollout.replicas:
                if replica.alive:
                    await _unless_lost(replica, version, self._send(replica, version))
            published, self._published = self._published, asyncio.Event()
            published.set()

    async def _send(self, replica: ReplicaHandle[RolloutWorker], version: int) -> None:
        """WorkerError, too, when the actor has other weights by now."""
        if not await self._offered(replica, version):
            raise WorkerError(f"{self._actor.name}: it has others by now than version {version}")

    async def _offered(self, replica: ReplicaHandle[RolloutWorker], version: int) -> bool:
        """Send them if the actor has these weights still; whether it has."""
        handle = await self._actor.call(ActorWorker.offer_weights, version)
        if handle is None:
            return False
        taking = asyncio.create_task(_take_up(replica, handle))
        try:
            while not await self._actor.call(ActorWorker.weights_awaited) and not taking.done():
                await asyncio.wait([taking], timeout=POLL_S)
            if not taking.done():  # the actor is held up by a replica that takes, and by no other
                await self._actor.call(ActorWorker.send_weights)
        except asyncio.CancelledError:
            taking.cancel()
            raise
        finally:  # what ends one side ends the other
            await asyncio.gather(taking, return_exceptions=True)
        taking.result()
        return True

    async def _welcome(self, replica: ReplicaHandle[Any]) -> None:
        while True:
            async with self._turn:
                published = self._published
                if self._version is None or await self._offered(replica, self._version):
                    return
            await published.wait()  # what the actor has now is no version yet


async def _take_up(replica: ReplicaHandle[RolloutWorker], handle: WeightsHandle) -> None:
    loaded = await replica.call(RolloutWorker.load_weights, handle)
    if loaded != handle.version:
        raise WorkerError(
            f"{replica.name}: says that it samples with version {loaded} of the weights after version "
            f"{handle.version} was handed over"
        )


async def _unless_lost(replica: ReplicaHandle[RolloutWorker], version: int, taking: Awaitable[None]) -> None:
    """One that is lost meanwhile gets the weights when it is back."""
    try:
        await taking
    except WorkerError as error:
        if replica.alive:
            raise
        logger.warning("%s; it gets version %d of the weights when it serves again", error, version)
