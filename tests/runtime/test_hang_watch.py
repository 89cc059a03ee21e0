"""Calls of components that do not come back are told of, with the line where they wait; others are not."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from rlcore.runtime.checked_components import CheckedAgent, CheckedCritic, CheckedRewards
from rlcore.runtime.hang_watch import HangWatch


@pytest.fixture
def watch() -> Iterator[HangWatch]:
    """Tells of calls after a twentieth of a second."""
    made = HangWatch(0.05)
    yield made
    made.close()
    assert "hang watch" not in [thread.name for thread in threading.enumerate()]


class Slow:
    """Every method waits for a third of a second, in one of several ways."""

    def __init__(self, way: str) -> None:
        self.way = way

    async def wait(self) -> None:
        if self.way == "blocks":
            time.sleep(0.3)  # a plugin that holds up the loop
        elif self.way == "streams":
            async for _ in self.items():
                pass
        else:
            await asyncio.sleep(0.3)

    async def items(self) -> AsyncIterator[int]:
        await asyncio.sleep(0.3)
        yield 1

    async def check(self, prompts: Any) -> None:
        await self.wait()

    begin_updates = end_updates = lambda self: self.check(None)
    values = update = save = restore = expect = check

    def metrics(self) -> dict[str, float]:
        time.sleep(0.3)
        return {}


CALLS: dict[str, Callable[[Slow, HangWatch], Any]] = {
    "check()": lambda slow, watch: CheckedAgent(slow, "x", watch).check([]),
    "begin_updates()": lambda slow, watch: CheckedCritic(slow, "x", watch, needed=True).begin_updates(),
    "end_updates()": lambda slow, watch: CheckedCritic(slow, "x", watch, needed=True).end_updates(),
}
INNER = {"awaits": "wait", "blocks": "wait", "streams": "items"}


@pytest.mark.parametrize("way", INNER)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_hangs_is_told_of_again_and_again(
    watch: HangWatch, caplog: pytest.LogCaptureFixture, call: str, way: str
) -> None:
    async def run() -> None:
        other = asyncio.create_task(asyncio.sleep(0.01))
        await CALLS[call](Slow(way), watch)
        await other

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) >= 2
    for line in messages:
        assert line.startswith(f"x: {call} has not returned for 0.")
        assert f" s, in {INNER[way]} at {__file__}:" in line


def test_a_plain_method_that_hangs_is_told_of(watch: HangWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CheckedRewards(Slow(""), "x", watch).metrics()
    assert f"in metrics at {__file__}:" in caplog.records[0].getMessage()


def test_calls_that_come_back_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    watch = HangWatch(5.0)
    with caplog.at_level(logging.WARNING):
        CheckedRewards(Slow(""), "x", watch).metrics()
        watch.close()
    assert caplog.records == []
