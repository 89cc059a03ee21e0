"""The critic engine: forwards the training loop's calls to the critic's worker."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from rlcore.contracts.critic import CriticEngine, CriticWorker
from rlcore.contracts.requests import Role
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors import ConfigError
from rlcore.types import Batch, Float32s, Metrics
from rlcore_critic_engine.explained import ExplainedVariance
from rlcore_critic_engine.settings import SECTION, CriticSettings

logger = logging.getLogger(__name__)

CRITIC = Role("critic", CriticWorker)


class ValueCritic(CriticEngine):
    """One worker with a value model."""

    def __init__(self, workers: WorkerGroup[CriticWorker], settings: CriticSettings) -> None:
        self._worker = workers.replicas[0]
        self._settings = settings
        self._updates = 0
        self._explained = ExplainedVariance()

    async def start(self) -> None:
        """Log what was loaded."""
        facts = await self._worker.call(CriticWorker.facts)
        if "head" in facts:
            logger.info("critic: the value head starts from: %s", facts["head"])

    async def expect(self, num_updates: int) -> int:
        """Number of updates left for the actor; ConfigError if it would wait for all of the run's."""
        waits = self._settings.actor_waits_updates
        if 0 < num_updates <= waits:
            raise ConfigError(
                f"{SECTION}.actor_waits_updates={waits}: the run has {num_updates} updates, so the policy would never "
                f"be trained; needs less than {num_updates}, or more steps (train.max_steps, train.epochs)"
            )
        await self._worker.call(CriticWorker.expect, num_updates)
        return num_updates - waits

    async def begin_updates(self) -> None:
        await self._worker.call(CriticWorker.begin_updates)

    async def end_updates(self) -> None:
        await self._worker.call(CriticWorker.end_updates)

    async def values(self, batch: Batch) -> Float32s:
        """(B, T) values before the first update of a step."""
        return await self._worker.call(CriticWorker.values, batch)

    async def update(self, minibatch: Batch) -> Metrics:
        """One optimizer step of the critic. The actor's step, if it may update, follows on the same mini-batch."""
        metrics = await self._worker.call(CriticWorker.update, minibatch)
        self._updates += 1
        await asyncio.to_thread(self._explained.add, minibatch)  # of long responses these are millions of numbers
        return metrics | {"critic/warming_up": float(not self.actor_may_update())}

    def actor_may_update(self) -> bool:
        """False in the first `actor_waits_updates` updates. Called after the critic's update."""
        return self._updates > self._settings.actor_waits_updates

    async def save(self, directory: Path) -> None:
        await self._worker.call(CriticWorker.save, directory)

    async def snapshot(self) -> bool:
        return await self._worker.call(CriticWorker.snapshot)

    async def write_snapshot(self, directory: Path) -> None:
        await self._worker.call(CriticWorker.write_snapshot, directory)

    async def restore(self, directory: Path) -> None:
        await self._worker.call(CriticWorker.restore, directory)

    def metrics(self) -> Metrics:
        """See `ExplainedVariance.metrics`; of the mini-batches since the last time."""
        explained, self._explained = self._explained, ExplainedVariance()
        return explained.metrics()

    def state(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def restore_state(self, state: dict[str, Any]) -> None:
        self._updates = int(state["updates"])
