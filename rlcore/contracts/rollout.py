"""The role that generates, and the service through which agent loops reach it."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rlcore.contracts.requests import Role
from rlcore.contracts.workers import Worker
from rlcore.errors import WorkerError
from rlcore.types import Completion, GenerateRequest, Lane, WeightsHandle


class RolloutWorker(Worker):
    """Continues token sequences."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes.

        The same set of requests gives the same tokens in whatever order it was submitted.
        """

    def context_length(self) -> int | None:
        """Tokens of a prompt and its response together, at most; None when the backend does not say."""
        return None

    async def load_weights(self, handle: WeightsHandle) -> int:
        """Sample with these weights from the next token on; returns their version, when no old one is used any more.

        Nothing that was computed with other weights, such as a cached prefix, is used with them. Called of rollouts
        that are not embedded in the actor, after every step.
        """
        raise WorkerError(
            f"{self.context}: {type(self).__name__} takes no weights, so it would sample with those that the run began "
            "with; choose another rollout.backend"
        )

    async def sleep(self) -> None:
        """Finish what is under way, begin nothing more, and let go of the device as far as the backend can.

        Called when the actor trains on the devices of this pool (`PoolSpec.colocates`).
        """
        raise WorkerError(f"{self.context}: {type(self).__name__} cannot sleep; choose another rollout.backend")

    async def wake(self) -> None:
        """Sample again; called of a replica that is awake, it changes nothing."""
        raise WorkerError(f"{self.context}: {type(self).__name__} cannot sleep; choose another rollout.backend")

    async def health(self) -> str:
        """What is served, in words; raises when it cannot be."""
        return f"{self.context}: {type(self).__name__}"


class Generator(Protocol):
    """The rollout service: routes requests to replicas."""

    def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes; WorkerError when the deadline passes."""
        ...


ROLLOUT = Role("rollout", RolloutWorker)
