"""The frozen policy that a KL term measures against."""

from abc import abstractmethod

from rlcore.contracts.requests import Role
from rlcore.contracts.workers import Worker
from rlcore.types import Batch, Float32s


class ReferenceWorker(Worker):
    """Holds frozen weights."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> Float32s:
        """(B, T) log-probs of the batch's tokens under the rollout's temperature."""


REFERENCE = Role("reference", ReferenceWorker)
"""The role of the frozen policy."""
