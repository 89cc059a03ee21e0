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
        """Yields every completion of every request as it finishes.

        The same set of requests gives the same tokens in any order of submission.
        """

    def context_length(self) -> int | None:
        """The most tokens of a prompt with its response; None if the backend does not know."""
        return None

    async def load_weights(self, handle: WeightsHandle) -> int:
        """Sample with these weights from the next token on; returns their version when the old ones are no longer used.

        Results of other weights, such as cached prefixes, must be discarded. Called after every step, on rollouts that
        are not embedded in the actor. A sleeping replica loads the weights and stays asleep.
        """
        raise WorkerError(
            f"{self.context}: {type(self).__name__} takes no weights, so it would sample with those that the run began "
            "with; choose another rollout.backend"
        )

    async def sleep(self) -> None:
        """Finish running requests, start no others, and free as much of the device as the backend can.

        Called when the actor trains on the devices of this pool (`PoolSpec.colocates`). The weights may be discarded:
        after the step, `load_weights` brings the next ones before `wake`. Only a failed step brings none.
        """
        raise WorkerError(f"{self.context}: {type(self).__name__} cannot sleep; choose another rollout.backend")

    async def wake(self) -> None:
        """Sample again, with the weights that were loaded last. No effect on a replica that is awake."""
        raise WorkerError(f"{self.context}: {type(self).__name__} cannot sleep; choose another rollout.backend")

    async def health(self) -> str:
        """Describes the served model in words; raises when the replica cannot serve it."""
        return f"{self.context}: {type(self).__name__}"


class Generator(Protocol):
    """The rollout service: routes requests to replicas."""

    def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """Yields every completion of every request as it finishes; WorkerError when the deadline passes."""
        ...


ROLLOUT = Role("rollout", RolloutWorker)
"""The role that generates."""
