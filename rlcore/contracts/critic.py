"""The critic slot: estimates values for advantage estimators that need them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rlcore.contracts.workers import Worker, concurrent
from rlcore.errors import PluginError, WorkerError
from rlcore.types import Batch, Float32s, Metrics


class CriticWorker(Worker):
    """Owns a value model and its optimizer."""

    @abstractmethod
    def values(self, batch: Batch) -> Float32s:
        """(B, T) value of the state before token t is sampled, where the loss mask is True, else 0."""

    def expect(self, num_updates: int) -> None:
        """Called once before the first update, with the number of updates of the whole run.

        Learning-rate schedules end at that number; `Batch.updates_left` of a mini-batch says how far from it they are.
        """

    def facts(self) -> dict[str, Any]:
        """Facts of the loaded model; 'head', if present, names the source of the value head's initial weights."""
        return {}

    def begin_updates(self) -> None:
        """Called before the first update of a step, to move the state that updates need to the device."""

    def end_updates(self) -> None:
        """Called after the last update of a step, and after an error, to free memory that only updates need."""

    @abstractmethod
    def update(self, minibatch: Batch) -> Metrics:
        """Exactly one optimizer step."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write the model directory and the training state into `directory`, which only the critic uses."""

    def snapshot(self) -> bool:
        """Copy the state that `save` would write into host memory; False if it cannot. See `ActorWorker.snapshot`."""
        return False

    @concurrent
    async def write_snapshot(self, directory: Path) -> None:
        """Write that copy while other calls come. See `ActorWorker.write_snapshot`."""
        raise WorkerError(f"{self.context}: {type(self).__name__} takes no snapshots, so there is none to write")

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load the files of `save`, bit for bit."""


class CriticEngine(ABC):
    """Fills the critic slot."""

    async def start(self) -> None:
        """Prepare for the other calls."""

    async def close(self) -> None:
        """Release everything."""

    async def expect(self, num_updates: int) -> int:
        """Called once before the first update, with the number of updates of the whole run.

        Returns the number of those in which the actor is updated as well.
        """
        return num_updates

    async def begin_updates(self) -> None:
        """Called before the first update of a step."""

    async def end_updates(self) -> None:
        """Called after the last update of a step, and after an error."""

    @abstractmethod
    async def values(self, batch: Batch) -> Float32s | None:
        """(B, T) values of the critic at the start of the step; None from the engine 'none'."""

    @abstractmethod
    async def update(self, minibatch: Batch) -> Metrics:
        """One optimizer step of the critic."""

    @abstractmethod
    def actor_may_update(self) -> bool:
        """False while the critic warms up."""

    async def save(self, directory: Path) -> None:
        """Write the critic into its part of the checkpoint, `directory`, which exists and is empty."""

    async def snapshot(self) -> bool:
        """Copy the state that `save` would write into host memory, and return True; one `write_snapshot` follows.

        By default False: the engine cannot, so training waits for its `save`.
        """
        return False

    async def write_snapshot(self, directory: Path) -> None:
        """Write the copy of the last `snapshot` as `save` would have written it. Updates come meanwhile."""
        raise PluginError(f"{type(self).__name__} takes no snapshots, so there is none to write")

    async def restore(self, directory: Path) -> None:
        """Load the files of `save`; if the engine wrote none, the directory does not exist."""

    def metrics(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""


class NoCritic(CriticEngine):
    """The engine 'none', for estimators that need no values."""

    async def snapshot(self) -> bool:
        return True

    async def write_snapshot(self, directory: Path) -> None:
        """Write nothing."""

    async def values(self, batch: Batch) -> Float32s | None:
        return None

    async def update(self, minibatch: Batch) -> Metrics:
        return {}

    def actor_may_update(self) -> bool:
        return True
