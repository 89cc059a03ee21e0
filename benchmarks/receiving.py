"""An rlcore plugin for `batches.py`: eight ranks that receive batches and compute nothing."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.contracts.components import Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.workers import Worker
from rlcore.types import Batch, Float32s, Metrics

RLCORE_API = "1"
NUM_RANKS = 8
PIPE = "RLCORE_BATCHES_PIPE"


def keep_in_pipe() -> None:
    """Stop this process from sharing memory."""
    from rlcore.cluster import shared_arrays

    shared_arrays.MIN_SHARED_BYTES = 1 << 62


class Receiver(Worker):
    """Reads its rows as a pass and an update would."""

    def setup(self) -> None:
        """Loads nothing. With PIPE in the environment, answers of any size go through the pipe."""
        if PIPE in os.environ:
            keep_in_pipe()

    def logprobs(self, batch: Batch) -> Float32s:
        """(B, T) of zeros."""
        self._read(batch)
        return np.zeros(batch.tokens.token_ids_BT.shape, dtype=np.float32)

    def update(self, minibatch: Batch) -> Metrics:
        """Returns the number of tokens that were read."""
        return {"num_tokens": self._read(minibatch)}

    def _read(self, batch: Batch) -> float:
        """Reads one row in eight: the share of a rank of eight."""
        rows = slice(self.context.rank, None, self.context.num_ranks)
        return float(batch.tokens.valid_BT[rows].sum()) + 0.0 * float(batch.tokens.token_ids_BT[rows].sum())


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[Any]]:
    asks = [WorkerRequest(Role("ranks", Receiver), "receiving", ranks=NUM_RANKS, cpus=0.1, threads=1)]
    return [Component("receiving", lambda context: None, lambda config, section: asks)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(Receiver, "receiving", Receiver)]
