"""The critic's worker: a shell around the core's training engine, which `setup` imports with torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.critic import CriticWorker
from rlcore.types import Batch, Float32s, Metrics, Ref

if TYPE_CHECKING:
    from rlcore.backends.hf import TrainEngine
    from rlcore_critic_engine.settings import CriticSettings


class HfCritic(CriticWorker):
    """A transformers backbone with one output, trained by a `TrainEngine` of kind value."""

    engine: TrainEngine

    def setup(self) -> None:
        import torch

        from rlcore.algo.registry import resolve
        from rlcore.backends.hf import TrainEngine

        context, settings = self.context, self._settings()
        if context.threads > 0:
            torch.set_num_threads(context.threads)
        # A checkpoint keeps torch's random state, so it must not depend on what this process did before the run.
        torch.manual_seed(context.seed)
        model = context.config.model
        self.engine = TrainEngine(
            "value",
            replace(model, path=settings.path or model.path),
            settings.engine(),
            resolve(context.references["value_loss"])(settings.value_clip),
            name="critic",
            loss_name="critic/loss",
            device=context.device,
        )

    def _settings(self) -> CriticSettings:
        settings: CriticSettings = self.context.section
        return settings

    def values(self, batch: Batch) -> Ref[Float32s]:
        return Ref(self.engine.values(batch))

    def update(self, minibatch: Batch) -> Metrics:
        return self.engine.update(minibatch)

    def save(self, directory: Path) -> None:
        self.engine.save(directory)

    def restore(self, directory: Path) -> None:
        self.engine.restore(directory)
