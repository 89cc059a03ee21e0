"""The interface of a process that serves a reward model. The component that requests such workers names their role."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.contracts.workers import Worker
from rlcore.types import FrozenDict, Message


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A conversation to judge."""

    id: str
    """Names the request in results and errors."""
    messages: tuple[Message, ...]
    """For a classifier: the whole conversation, whose end is judged. For a generative judge: the question."""
    options: FrozenDict[str, Any] = field(default_factory=FrozenDict)
    """For a generative judge: sampling options such as max_tokens."""


@dataclass(frozen=True)
class RawScore:
    """A model's answer to one request."""

    id: str
    score: float | None = None
    """From a classifier or scalar head; None for a generative judge."""
    text: str = ""
    """From a generative judge: its answer, from which the caller takes the score."""
    error: str = ""
    """The reason why this request failed, such as its length; empty: it succeeded."""


class RewardReplica(Worker):
    """Serves a reward model; calls of `score` overlap, and the replica forms batches by itself."""

    @abstractmethod
    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """An answer to each request, in their order.

        The replica does not wait for more requests: its queue at that moment is a batch. A problem of one request is
        its `RawScore.error`. An exception means that the replica is broken; the caller then retries on another.
        """

    @abstractmethod
    async def health(self) -> str:
        """Describes the served model in words; raises when the replica cannot serve it."""

    async def address(self) -> str | None:
        """Base URL of an OpenAI-style API on this machine, such as 'http://127.0.0.1:8000/v1'; None without one."""
        return None

    async def sleep(self) -> None:
        """Answer queued requests, stop admitting others, and free as much of the device as the backend can."""

    async def wake(self) -> None:
        """Admit requests again. No effect on a replica that is awake."""
