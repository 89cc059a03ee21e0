"""The critic engine: what the training loop asks, sent to the critic's worker."""

from pathlib import Path
from typing import Any

from rlcore.critic import CriticEngine, CriticWorker
from rlcore.plan import Role
from rlcore.types import Batch, Float32s, Metrics, Ref
from rlcore.workers import WorkerGroup
from rlcore_critic_engine.settings import CriticSettings

CRITIC = Role("critic", CriticWorker)
DIRECTORY = "critic"
"""Where a checkpoint holds the critic; its top belongs to the actor."""


class ValueCritic(CriticEngine):
    """One worker with a value model."""

    def __init__(self, workers: WorkerGroup[CriticWorker], settings: CriticSettings) -> None:
        self._worker = workers.replicas[0]
        self._settings = settings
        self._steps = 0

    async def values(self, batch: Batch) -> Ref[Float32s]:
        """(B, T) values before the first update of a step; the loop asks once a step, which counts the steps."""
        self._steps += 1
        return await self._worker.call(CriticWorker.values, batch)

    async def update(self, minibatch: Batch) -> Metrics:
        return await self._worker.call(CriticWorker.update, minibatch)

    def actor_may_update(self) -> bool:
        return self._steps > self._settings.actor_starts_after

    async def save(self, directory: Path) -> None:
        await self._worker.call(CriticWorker.save, directory / DIRECTORY)

    async def restore(self, directory: Path) -> None:
        await self._worker.call(CriticWorker.restore, directory / DIRECTORY)

    def metrics(self) -> Metrics:
        """critic/warming_up: 1.0 in a step in which only the critic learnt."""
        return {"critic/warming_up": float(not self.actor_may_update())}

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def restore_state(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
