"""The frozen policy that a KL term measures against."""

from abc import abstractmethod

from rlcore.plan import Role
from rlcore.types import Batch, Float32s, Ref
from rlcore.workers import Worker


class ReferenceWorker(Worker):
    """Holds frozen weights."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> Ref[Float32s]:
        """(B, T) log-probs of the batch's tokens under the rollout's temperature."""


REFERENCE = Role("reference", ReferenceWorker)
