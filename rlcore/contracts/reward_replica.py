"""The interface of a process that serves a reward model. Who asks for such workers also names their role."""

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
    """For a classifier: the whole conversation, whose end is judged. For a generative judge: what it is asked."""
    options: FrozenDict[str, Any] = field(default_factory=FrozenDict)
    """For a generative judge: sampling options such as max_tokens."""


@dataclass(frozen=True)
class RawScore:
    """What a model said of one request."""

    id: str
    score: float | None = None
    """Of a classifier or scalar head; None of a generative judge."""
    text: str = ""
    """Of a generative judge: its answer, from which the caller takes the score."""
    error: str = ""
    """Why this request, and no other, has no answer: it is too long, for one."""


class RewardReplica(Worker):
    """Serves a reward model; `score` is called many times at once, and the replica forms batches by itself."""

    @abstractmethod
    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """An answer to each request, in their order.

        Waits for nothing but the requests it was given: a batch is whatever is queued. What is wrong with a request is
        its `RawScore.error`; an exception means that the replica itself is broken, and its caller goes elsewhere.
        """

    @abstractmethod
    async def health(self) -> str:
        """What is served, in words; raises when it cannot be."""

    async def address(self) -> str | None:
        """Base URL of an OpenAI-style API on this machine, such as 'http://127.0.0.1:8000/v1'; None without one."""
        return None

    async def sleep(self) -> None:
        """Answer what is queued, admit nothing more, and let go of the device as far as the backend can."""

    async def wake(self) -> None:
        """Take requests again; called of a replica that is awake, it changes nothing."""
