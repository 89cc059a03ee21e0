"""Component calls that do not return are reported with the line where they wait; others are not."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from rlcore.cluster.replica import ReplicaGroup
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.agents import RolloutTask
from rlcore.contracts.offers import Scope
from rlcore.runtime.checked_components import CheckedAgent, CheckedCritic, CheckedRewards
from rlcore.runtime.hang_watch import HangWatch
from rlcore.runtime.utilization import BusyMeter
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Lane, Reward, Sampling, ScoredTrajectory, Trajectory


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


@pytest.mark.slow
@pytest.mark.parametrize("way", INNER)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_hangs_is_reported_again_and_again(
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


@pytest.mark.slow
def test_a_plain_method_that_hangs_is_reported(watch: HangWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CheckedRewards(Slow(""), "x", watch).metrics()
    assert f"in metrics at {__file__}:" in caplog.records[0].getMessage()


class Waiting:
    """A replica whose ranks wait for one that is slow."""

    name = "actor[0]"
    alive = True

    async def call(self, method: Any, *args: Any) -> None:
        await asyncio.sleep(0.3)


@pytest.mark.slow
def test_a_call_of_a_worker_is_reported_for_which_its_ranks_wait_for_a_slow_one(
    watch: HangWatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica: Any = Waiting()
    group = BusyMeter({}, watch=watch).metered("actor", ReplicaGroup([replica]))
    asyncio.run(group.replicas[0].call(ActorWorker.update))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) > 1
    assert all(line.startswith("actor[0].update() has not returned for 0.") for line in lines), lines


@pytest.mark.slow
def test_calls_that_return_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    watch = HangWatch(5.0)
    with caplog.at_level(logging.WARNING):
        CheckedRewards(Slow(""), "x", watch).metrics()
        watch.close()
    assert caplog.records == []


TASKS = [RolloutTask(make_prompt(0), n=2, seed=0, epoch=0)]


class Stopping:
    """Streams that stop after some items: an agent loop, and a reward manager."""

    scope = Scope.SAMPLE

    def __init__(self, items: int, stop: str = "stops") -> None:
        self.num_items, self.stop = items, stop

    async def rollout(self, tasks: Any, sampling: Any, lane: Any) -> AsyncIterator[Trajectory]:
        for sample in range(self.num_items):
            yield make_trajectory(0, sample=sample)
        await self.stops()

    async def score(self, trajectories: AsyncIterator[Trajectory], lane: Any) -> AsyncIterator[ScoredTrajectory]:
        if self.stop == "reads nothing":
            await self.stops()
        num_scored = 0
        async for trajectory in trajectories:
            if num_scored == self.num_items:
                await self.stops()
            num_scored += 1
            yield ScoredTrajectory(trajectory, Reward(1.0))
        if self.stop == "does not end":
            await self.stops()

    async def stops(self) -> None:
        await asyncio.Event().wait()


async def trajectories_after(num: int, pause_s: float = 0.0) -> AsyncIterator[Trajectory]:
    for sample in range(num):
        await asyncio.sleep(pause_s)
        yield make_trajectory(0, sample=sample)


async def taken(stream: AsyncIterator[Any], limit_s: float, hold_s: float = 0.0) -> int:
    """The number of items that came in that time."""
    num = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            async for _ in stream:
                num += 1
                await asyncio.sleep(hold_s)
    return num


@pytest.mark.slow
@pytest.mark.parametrize("num", [0, 1, 2])
def test_an_agent_loop_that_never_ends_is_reported(
    watch: HangWatch, caplog: pytest.LogCaptureFixture, num: int
) -> None:
    agent = CheckedAgent(Stopping(num), "agent 'a' of plugin 'x'", watch)
    assert asyncio.run(taken(agent.rollout(TASKS, Sampling(), Lane.TRAIN), 0.3)) == num
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) >= 2, "again and again"
    for warning in warnings:
        assert warning.startswith("agent 'a' of plugin 'x': rollout() has yielded nothing for ")
        assert "in stops()" in warning or "stops" in warning


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["stops", "reads nothing", "does not end"])
def test_a_reward_manager_whose_stream_never_returns_is_reported(
    watch: HangWatch, caplog: pytest.LogCaptureFixture, stop: str
) -> None:
    manager = CheckedRewards(Stopping(2 if stop == "does not end" else 1, stop), "reward 'r' of plugin 'x'", watch)
    num = {"stops": 1, "reads nothing": 0, "does not end": 2}[stop]
    assert asyncio.run(taken(manager.score(trajectories_after(2), Lane.TRAIN), 0.3)) == num
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) >= 2
    for warning in warnings:
        assert warning.startswith("reward 'r' of plugin 'x': score() has yielded nothing for ")
        assert "stops" in warning


@pytest.mark.slow
@pytest.mark.parametrize(("pause_s", "hold_s"), [(0.3, 0.0), (0.0, 0.3)])
def test_time_in_which_a_stream_waits_for_its_caller_is_not_reported(
    caplog: pytest.LogCaptureFixture, pause_s: float, hold_s: float
) -> None:
    watch = HangWatch(0.15)
    manager = CheckedRewards(Stopping(2), "reward 'r'", watch)
    assert asyncio.run(taken(manager.score(trajectories_after(2, pause_s), Lane.TRAIN), 5.0, hold_s)) == 2
    agent = CheckedAgent(Ending(), "agent 'a'", watch)
    assert asyncio.run(taken(agent.rollout(TASKS, Sampling(), Lane.TRAIN), 5.0, hold_s)) == 2
    watch.close()
    assert [record.getMessage() for record in caplog.records] == []


class Ending(Stopping):
    """An agent loop that ends."""

    def __init__(self) -> None:
        super().__init__(2)

    async def stops(self) -> None:
        """At once."""
