"""The replica on transformers: a thin shell, so that planning does not import torch."""

import asyncio
from collections.abc import Sequence

from rlcore import RawScore, RewardReplica, ScoreRequest, WorkerError
from rlcore.contracts.reward_models import Unreadable, model_of
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings, health_limit_s


class HfReplica(RewardReplica):
    """Serves a sequence classifier or scalar head."""

    def setup(self) -> None:
        """Load the model; ConfigError or WorkerError naming it when that fails."""
        from rlcore_reward_loop.models.batching import Batcher
        from rlcore_reward_loop.models.classifier import Classifier

        self.settings: ModelSettings = self._section().models[self.context.role]
        self._classifier = Classifier(model_of(self.context), self.context.device, self.context.threads)
        self._batcher = Batcher(self._classifier.scores, self.settings.batch_tokens, self.settings.batch_wait_s)
        self._awake = asyncio.Event()
        self._awake.set()

    def _section(self) -> RewardLoopSettings:
        section = self.context.settings(RewardLoopSettings)
        if self.context.role not in section.models:
            raise WorkerError(f"{self.context}: plugins.reward_loop.models has no '{self.context.role}'")
        return section

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """The score of each conversation; one that cannot be read or is too long has an error instead."""
        await self._awake.wait()
        return list(await asyncio.gather(*(self._score(request) for request in requests)))

    async def _score(self, request: ScoreRequest) -> RawScore:
        try:
            ids = self._classifier.conversations.read(request.messages)
        except Unreadable as cause:
            return RawScore(request.id, error=str(cause))
        return RawScore(request.id, await self._batcher.score(ids))

    async def health(self) -> str:
        """A description of the model, after it computed one token ahead of queued requests; else WorkerError."""
        if self._awake.is_set():
            await self._batcher.probe(self._classifier.conversations.pad_id or 0, health_limit_s(self.settings))
        return f"{self.settings.path} on {self.context.device}"

    async def sleep(self) -> None:
        """Drain, then free the device's memory; does nothing else on a CPU."""
        self._awake.clear()
        await self._batcher.drained()
        self._classifier.offload()

    async def wake(self) -> None:
        self._classifier.reload()
        self._awake.set()

    def close(self) -> None:
        if hasattr(self, "_batcher"):
            self._batcher.close()
