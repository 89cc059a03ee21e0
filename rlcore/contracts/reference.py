"""The frozen policy that a KL term measures against."""

from abc import abstractmethod
from dataclasses import dataclass

from rlcore.contracts.requests import Role
from rlcore.contracts.workers import Worker
from rlcore.types import Batch, Float32s


class ReferenceWorker(Worker):
    """Holds frozen weights."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> Float32s:
        """(B, T) log-probs of the batch's tokens under the rollout's temperature."""


@dataclass(frozen=True)
class ReferenceSlices:
    """The `spec` of a reference's request."""

    num: int = 1
    """Ranks that hold slices of the same sequences, if shared prompts are computed with `SharedPrefix.TREE`."""


REFERENCE = Role("reference", ReferenceWorker)
"""The role of the frozen policy."""
