"""A client that leaves before its answer: its turn is not sampled to the end, and its next request is recorded once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from rlcore_agent_loop.testing import END, HELLO, Ask, ScriptedPolicy, served

from rlcore.types import Completion, GenerateRequest, Lane

MORE = {"role": "user", "content": "more"}


class SlowPolicy(ScriptedPolicy):
    """Answers once `go` is set."""

    def __init__(self) -> None:
        super().__init__(lambda sample, turn, ids: [*b"one", END])
        self.go = asyncio.Event()
        self.left: list[str] = []
        """Names of requests that were cancelled before they were answered."""

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """See `rlcore.contracts.rollout.Generator`."""
        self.requests += requests
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left += [request.id for request in requests]
            raise
        for request in requests:
            yield self._completion(request, 0, 0, 1)


@pytest.mark.parametrize("continues", [False, True], ids=["first turn", "later turn"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_whose_client_left_is_aborted_and_its_retry_is_recorded_once(stream: bool, continues: bool) -> None:
    policy = SlowPolicy()

    async def work(ask: Ask) -> None:
        body: dict[str, Any] = HELLO
        if continues:
            policy.go.set()
            _, first = await ask(HELLO)
            body = {"messages": [*HELLO["messages"], first["choices"][0]["message"], MORE]}
            policy.go.clear()
        num_before = len(policy.requests)
        leaving = asyncio.create_task(ask({**body, "stream": stream}))
        while len(policy.requests) == num_before:
            await asyncio.sleep(0.001)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(20):
            while not policy.left:  # for ever, were it sampled to the end
                await asyncio.sleep(0.001)
        policy.go.set()
        assert (await ask({**body, "stream": stream}))[0] == 200

    recording = served(policy, work)
    first, later = b"user: hello\nassistant: one", b"\nuser: more\nassistant: one"
    [found] = recording.episode.trajectories()
    assert found.token_ids.tolist() == [*first, END, *([*later, END] if continues else [])]
    assert recording.num_requests == 2 + continues
    assert recording.failure is None
