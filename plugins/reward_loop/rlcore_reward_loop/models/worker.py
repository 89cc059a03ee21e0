"""The replica on transformers: a thin shell, so that planning does not import torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore import RawScore, RewardReplica, ScoreRequest, WorkerError
from rlcore.aio import SleepGate
from rlcore.contracts.reward_models import Unreadable, model_of
from rlcore_reward_loop.checks import WHERE
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings, health_limit_s

if TYPE_CHECKING:
    from rlcore_reward_loop.models.classifier import Classifier
    from rlcore_reward_loop.models.mesh import MeshClassifier


class HfReplica(RewardReplica):
    """Serves a sequence classifier or scalar head, on one rank or several.

    Of several ranks, the first one answers: it forms the batches, and the others compute their parts of them.
    """

    _mesh: MeshClassifier | None = None
    """The ranks of this replica; None: this process has the whole model."""

    def setup(self) -> None:
        """Load the model; ConfigError or WorkerError naming it when that fails."""
        from rlcore_reward_loop.models.batching import Batcher

        self.settings: ModelSettings = self._section().models[self.context.role]
        self._classifier = self._load()
        shares = 1 if self._mesh is None else self._mesh.num_shares
        tokens = self.settings.batch_tokens * shares
        self._batcher = Batcher(self._classifier.scores, tokens, self.settings.batch_wait_s)
        self._gate = SleepGate()

    def _load(self) -> Classifier | MeshClassifier:
        context, model = self.context, model_of(self.context)
        if context.num_ranks == 1:
            from rlcore_reward_loop.models.classifier import Classifier

            return Classifier(model, context.device, context.threads)
        from rlcore_reward_loop.models.mesh import MeshClassifier

        self._mesh = MeshClassifier(model, context, self.settings, f"{WHERE}.models.{context.role}")
        return self._mesh

    def _section(self) -> RewardLoopSettings:
        section = self.context.settings(RewardLoopSettings)
        if self.context.role not in section.models:
            raise WorkerError(f"{self.context}: plugins.reward_loop.models has no '{self.context.role}'")
        return section

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """The score of each conversation; one that cannot be read or is too long has an error instead.

        Empty on ranks other than the first.
        """
        if self.context.rank:
            return []
        async with self._gate.inside():
            return list(await asyncio.gather(*(self._score(request) for request in requests)))

    async def _score(self, request: ScoreRequest) -> RawScore:
        try:
            ids = self._classifier.conversations.read(request.messages)
        except Unreadable as cause:
            return RawScore(request.id, error=str(cause))
        return RawScore(request.id, await self._batcher.score(ids))

    async def health(self) -> str:
        """A description of the model, after it computed one token ahead of queued requests; else WorkerError."""
        if self._gate.is_open and not self.context.rank:
            await self._batcher.probe(self._classifier.conversations.pad_id or 0, health_limit_s(self.settings))
        return f"{self.settings.path} on {self.context.device}"

    async def sleep(self) -> None:
        """Drain, then free the device's memory; does nothing else on a CPU."""
        if self._mesh is not None and self.context.rank:
            await self._mesh.offloaded()
            return
        await self._gate.close()
        await self._batcher.drained()
        self._classifier.offload()

    async def wake(self) -> None:
        if self._mesh is not None and self.context.rank:
            await self._mesh.reloaded()
            return
        self._classifier.reload()
        self._gate.open()

    def close(self) -> None:
        if hasattr(self, "_batcher"):
            self._batcher.close()
        if self._mesh is not None:
            self._mesh.close()
