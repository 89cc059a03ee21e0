"""Calls of an async reward function: what is left of one that nothing waits for, and of one that is closed."""

import asyncio
import gc
import logging
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.aio import Stopwatch
from rlcore.errors import ChildError
from rlcore.errors.redaction import LONGEST_TEXT
from rlcore.reward.loop_calls import Allowance, LoopCaller
from rlcore.reward.spec import FunctionSpec
from rlcore.reward.watchdog import LoopWatch
from rlcore.testing.rewards import make_trajectory
from rlcore.types import Lane

REWARDS = """
import asyncio

async def raises(trajectory):
    raise KeyError("gone")

async def floods(trajectory):
    raise KeyError("x" * 1_000_000)

async def waits(trajectory):
    await asyncio.sleep(60)
"""


def called(name: str, directory: Path, use: Callable[[LoopCaller, "asyncio.Task[Any]"], Awaitable[None]]) -> list[str]:
    """Use a caller and the task of its call, which has just been made; returns what asyncio complained of."""
    (directory / "rewards.py").write_text(REWARDS)

    async def main() -> list[str]:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        watch = LoopWatch()
        caller = LoopCaller(FunctionSpec("f", f"{directory / 'rewards.py'}:{name}"), watch, Stopwatch(), 4)
        await caller.start(10.0)
        try:
            call = asyncio.create_task(caller.call([make_trajectory()], Lane.TRAIN, Allowance(30.0)))
            await asyncio.sleep(0)
            await use(caller, call)
            del call
            gc.collect()
            await asyncio.sleep(0)
            return complaints
        finally:
            await caller.close()
            watch.close()

    return asyncio.run(asyncio.wait_for(main(), 20.0))


@pytest.mark.slow
def test_an_error_is_seen_also_where_the_caller_leaves_as_it_is_raised(tmp_path: Path) -> None:
    async def use(caller: LoopCaller, call: "asyncio.Task[Any]") -> None:
        await asyncio.sleep(0)
        call.cancel()  # the function has raised, and the task that waits for it does not know yet
        with pytest.raises(asyncio.CancelledError):
            await call

    assert called("raises", tmp_path, use) == []


@pytest.mark.slow
def test_an_error_keeps_neither_the_exception_nor_all_of_its_text(tmp_path: Path) -> None:
    async def use(caller: LoopCaller, call: "asyncio.Task[Any]") -> None:
        with pytest.raises(ChildError, match="KeyError: 'xxx") as caught:
            await call
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None
        assert len(str(caught.value)) < 110_000
        assert len(caught.value.trace) <= LONGEST_TEXT

    assert called("floods", tmp_path, use) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_turns", [0, 3])
def test_closing_ends_running_calls_and_those_that_have_not_begun(num_turns: int, tmp_path: Path) -> None:
    async def use(caller: LoopCaller, call: "asyncio.Task[Any]") -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await caller.close()
        with pytest.raises(ChildError, match="it cancelled itself"):
            await asyncio.wait_for(call, 5.0)

    assert called("waits", tmp_path, use) == []


def test_a_function_whose_short_steps_take_most_of_the_loops_time_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = LoopWatch(window_s=0.1)

    async def computes() -> None:
        time.sleep(0.02)

    async def waits() -> None:
        await asyncio.sleep(0.02)

    async def main() -> None:
        for _ in range(9):
            await watch.watched("busy", computes())
        for _ in range(9):
            await watch.watched("patient", waits())

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (message,) = caplog.messages
    assert re.match(r"async reward function 'busy' blocked the event loop for 0\.\d+ of 0\.\d+ s, in \d short", message)
    assert "steps: every other call waits for it; await what takes time, or make it a plain function" in message
