"""A conversation with a checkpoint: turns, the window, and answers that fail."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import WorkerError
from rlcore.train.conversing import Chat
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling


class Echo:
    """Answers each request with 'a', and keeps the requests."""

    def __init__(self, error: str = "") -> None:
        self.requests: list[GenerateRequest] = []
        self._error = error

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        self.requests += requests
        ids = np.array([] if self._error else [97], dtype=np.int32)
        logprobs = np.zeros(len(ids), dtype=np.float32)
        yield Completion(requests[0].id, 0, ids, logprobs, FinishReason.STOP, 0, error=self._error)


def talk(generator: Echo, window: int | None = None, system: str = "") -> Chat:
    return Chat(generator, ByteTokens(), Sampling(max_tokens=4), 1, window, system)


def test_each_turn_has_those_before_it_until_a_reset() -> None:
    generator = Echo()
    conversation = talk(generator, system="be short")
    assert [asyncio.run(conversation.answer(text)) for text in ("one", "two")] == ["a", "a"]
    tokens = ByteTokens()
    texts = [tokens.decode(list(request.token_ids)) for request in generator.requests]
    assert all(word in texts[1] for word in ("be short", "one", "a", "two"))
    assert generator.requests[0].seed != generator.requests[1].seed
    conversation.reset()
    asyncio.run(conversation.answer("three"))
    last = tokens.decode(list(generator.requests[-1].token_ids))
    assert "be short" in last
    assert "one" not in last


def test_what_exceeds_the_window_is_refused_and_not_kept() -> None:
    generator = Echo()
    conversation = talk(generator, window=40)
    with pytest.raises(WorkerError, match=r"exceed the window of 40; begin again with /reset"):
        asyncio.run(conversation.answer("x" * 100))
    assert asyncio.run(conversation.answer("y")) == "a"
    assert "x" not in ByteTokens().decode(list(generator.requests[-1].token_ids))


def test_an_answer_that_failed_is_reported() -> None:
    with pytest.raises(WorkerError, match="chat: the replica died; begin again"):
        asyncio.run(talk(Echo("the replica died")).answer("x"))
