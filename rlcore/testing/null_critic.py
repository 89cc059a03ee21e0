"""A critic without torch: one value per place in a response, independent of the tokens.

Shape letters: B rows, T token positions, L places. A place is the number of earlier sampled tokens of the row; the last
place covers all later ones.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.contracts.critic import CriticWorker
from rlcore.contracts.workers import WorkerContext
from rlcore.errors import CheckpointError, boundary
from rlcore.testing.null_busy import Busy
from rlcore.types import Batch, Float32s, Metrics

PLACES = 64
RATE = 0.5
"""Share of the distance to the mean return by which an update moves a value."""


class NullCritic(Busy, CriticWorker):
    """Values that move towards the mean return of their place. The settings of the critic engine are not read."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.values_L: npt.NDArray[np.float64] = np.zeros(PLACES)

    def setup(self) -> None:
        """Does nothing: the critic needs no files."""

    def values(self, batch: Batch) -> Float32s:
        with self.busy():
            mask_BT = batch.tokens.loss_mask_BT
            return np.where(mask_BT, self.values_L[_places(batch)], 0.0).astype(np.float32)

    def update(self, minibatch: Batch) -> Metrics:
        """Returns half the mean squared distance from the returns before the update; ValueError without returns."""
        if minibatch.returns_BT is None:
            raise ValueError("the mini-batch has no returns")
        with self.busy():
            return self._update(minibatch, minibatch.returns_BT)

    def _update(self, minibatch: Batch, returns_BT: Float32s) -> Metrics:
        mask_BT = minibatch.tokens.loss_mask_BT
        place_N = _places(minibatch)[mask_BT]
        errors_N = returns_BT[mask_BT].astype(np.float64) - self.values_L[place_N]
        counts_L = np.bincount(place_N, minlength=PLACES)
        self.values_L += RATE * np.bincount(place_N, weights=errors_N, minlength=PLACES) / np.maximum(counts_L, 1)
        return {"critic/loss": 0.5 * float((errors_N**2).mean())} if len(errors_N) else {}

    def save(self, directory: Path) -> None:
        _write(directory, self.values_L)

    def snapshot(self) -> bool:
        self._copied_L = self.values_L.copy()
        return True

    async def write_snapshot(self, directory: Path) -> None:
        _write(directory, self._copied_L)

    def restore(self, directory: Path) -> None:
        with boundary(f"checkpoint '{directory}': reading values.json", CheckpointError):
            values: Any = json.loads((directory / "values.json").read_text())
            self.values_L = np.array(values, dtype=np.float64)


def _write(directory: Path, values_L: npt.NDArray[np.float64]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "values.json").write_text(json.dumps(values_L.tolist()))


def _places(batch: Batch) -> npt.NDArray[np.int64]:
    """(B, T) number of the row's tokens that were sampled earlier."""
    mask_BT = batch.tokens.loss_mask_BT
    places_BT: npt.NDArray[np.int64] = np.clip(np.cumsum(mask_BT, axis=1) - mask_BT, 0, PLACES - 1)
    return places_BT
