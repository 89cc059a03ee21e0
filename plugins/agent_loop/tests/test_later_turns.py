"""Turns that are asked for at the same moment share a call, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from rlcore_agent_loop.conversation.turn_sampler import LaterTurns

from rlcore import WorkerError
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling


class Engine:
    """Answers a call's requests in their order, each after `seconds`; a token is the request's seed."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None, silent: bool = False) -> None:
        self._seconds, self._error, self._silent = seconds, error, silent
        self.calls: list[list[str]] = []
        self.stopped: list[list[str]] = []

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """See `rlcore.contracts.rollout.Generator`."""
        names = [trajectory.id for trajectory in requests]
        self.calls.append(names)
        try:
            for trajectory in requests:
                await asyncio.sleep(self._seconds)
                if self._error is not None:
                    raise self._error
                if not self._silent:
                    ids = np.array([trajectory.seed], dtype=np.int32)
                    yield Completion(trajectory.id, 0, ids, np.zeros(1, dtype=np.float32), FinishReason.STOP, 0)
        except asyncio.CancelledError:
            self.stopped.append(names)
            raise


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, (1,), Sampling(), 1, ord(name))


async def calls_of(turns: LaterTurns, names: str) -> "list[asyncio.Task[Completion]]":
    """A task a turn, all asked for at the same moment and on their way to the engine."""
    tasks = [asyncio.create_task(turns.ask(request(name))) for name in names]
    await asyncio.sleep(0.01)
    return tasks


def test_turns_asked_for_at_the_same_moment_are_one_call_and_later_ones_another() -> None:
    engine = Engine()

    async def run() -> list[int]:
        turns = LaterTurns(engine, Lane.TRAIN)
        found = [await value for names in ("abc", "d") for value in await calls_of(turns, names)]
        return [int(completion.token_ids[0]) for completion in found]

    assert asyncio.run(run()) == [ord(name) for name in "abcd"]
    assert engine.calls == [["a", "b", "c"], ["d"]]


def test_a_cancelled_turn_ends_its_call_only_if_no_other_caller_waits() -> None:
    engine = Engine(seconds=0.05)

    async def run() -> list[int]:
        turns = LaterTurns(engine, Lane.TRAIN)
        first, second, third, fourth = await calls_of(turns, "abcd")
        await first
        for value in (second, fourth):
            value.cancel()
            with pytest.raises(asyncio.CancelledError):
                await value
        assert engine.stopped == []
        return [int(completion.token_ids[0]) for completion in (await first, await third)]

    assert asyncio.run(run()) == [ord("a"), ord("c")]
    assert engine.calls == [["a", "b", "c", "d"]]


def test_a_call_ends_when_no_caller_waits_for_its_last_turns() -> None:
    engine = Engine(seconds=0.05)

    async def run() -> int:
        first, second = await calls_of(LaterTurns(engine, Lane.TRAIN), "ab")
        second.cancel()
        await first
        await asyncio.sleep(0.01)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_a_turn_cancelled_before_it_was_sent_is_never_requested() -> None:
    engine = Engine()

    async def run() -> None:
        turns = LaterTurns(engine, Lane.TRAIN)
        task = asyncio.create_task(turns.ask(request("a")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert engine.calls == []


@pytest.mark.parametrize(
    ("engine", "why"), [(Engine(error=WorkerError("it broke")), "it broke"), (Engine(silent=True), "never finished")]
)
def test_an_error_that_ends_a_call_reaches_every_waiting_request(engine: Engine, why: str) -> None:
    async def run() -> list[BaseException | Completion]:
        return await asyncio.gather(*await calls_of(LaterTurns(engine, Lane.TRAIN), "ab"), return_exceptions=True)

    assert [isinstance(value, WorkerError) and why in str(value) for value in asyncio.run(run())] == [True, True]


def test_when_all_requests_are_cancelled_at_once_nothing_keeps_running() -> None:
    engine = Engine(seconds=60.0)

    async def run() -> int:
        tasks = await calls_of(LaterTurns(engine, Lane.TRAIN), "abc")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
    assert engine.stopped == [["a", "b", "c"]]
