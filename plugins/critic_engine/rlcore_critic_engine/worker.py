"""The critic's worker: a shell around the core's training engine, which `setup` imports along with torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.contracts.critic import CriticWorker
from rlcore.engines.hf import device_turn
from rlcore.errors import ConfigError, WorkerError
from rlcore.types import Batch, Float32s, Metrics

if TYPE_CHECKING:
    from rlcore.engines.hf import TrainEngine


class HfCritic(CriticWorker):
    """A transformers model with one output, trained by a `TrainEngine` of kind value."""

    engine: TrainEngine
    head: str
    """A description of what the value head starts from."""

    def setup(self) -> None:
        from rlcore_critic_engine.start import start_engine

        self.engine, self.head = start_engine(self.context)

    def close(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None and engine.ranks is not None and self.context.host is None:  # else the actor's ranks
            engine.ranks.close()

    def facts(self) -> dict[str, Any]:
        return self.engine.facts() | {"head": self.head}

    def expect(self, num_updates: int) -> None:
        self.engine.expect(num_updates)

    def begin_updates(self) -> None:
        self.engine.begin_updates()

    def end_updates(self) -> None:
        self.engine.end_updates()

    def values(self, batch: Batch) -> Float32s:
        """(B, T) values, 0 outside the loss mask.

        ConfigError when a row does not fit the critic's window, WorkerError when a value is not finite; both before any
        update.
        """
        import numpy as np

        window, longest = self.engine.model.context_length, int(batch.lengths_B.max(initial=0))
        if window is not None and longest > window:
            raise ConfigError(
                f"plugins.critic_engine.path: a row has {longest} tokens, and the critic's window holds {window}; "
                "choose a model with a longer one, or lower data.max_prompt_tokens or rollout.max_tokens"
            )
        with device_turn(self.context):
            values_BT = self.engine.values(batch)
        if not np.isfinite(values_BT).all():
            num = int((~np.isfinite(values_BT)).sum())
            raise WorkerError(
                f"{self.context}: {num} of the values of {int(batch.num_sampled_B.sum())} tokens are not finite; the "
                "critic has diverged, and nothing was updated: lower plugins.critic_engine.lr, or resume from an "
                "earlier checkpoint"
            )
        return values_BT

    def update(self, minibatch: Batch) -> Metrics:
        """One optimizer step.

        A mini-batch without a loss token (nothing sampled, or every row truncated, with `algo.overlong=mask`) changes
        nothing and counts as skipped.
        """
        with device_turn(self.context):
            return self.engine.update(minibatch)

    def save(self, directory: Path) -> None:
        self.engine.save(directory)

    def snapshot(self) -> bool:
        self.engine.snapshot()
        return True

    async def write_snapshot(self, directory: Path) -> None:
        self.engine.write_snapshot(directory)

    def restore(self, directory: Path) -> None:
        """Load what `save` wrote; CheckpointError, before any change, if it has no value head or another trunk."""
        from rlcore_critic_engine.settings import CriticSettings
        from rlcore_critic_engine.start import check_has_head, check_same_trunk

        check_has_head(directory)
        check_same_trunk(directory, self.context.settings(CriticSettings))
        self.engine.restore(directory)
