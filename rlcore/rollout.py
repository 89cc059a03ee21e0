"""The role that generates, and the service through which agent loops reach it."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rlcore.plan import Role
from rlcore.types import Completion, GenerateRequest, Lane
from rlcore.workers import Worker


class RolloutWorker(Worker):
    """Continues token sequences."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes.

        The same set of requests gives the same tokens in whatever order it was submitted.
        """


class Generator(Protocol):
    """The rollout service: routes requests to replicas."""

    def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes; WorkerError when the deadline passes."""
        ...


ROLLOUT = Role("rollout", RolloutWorker)
