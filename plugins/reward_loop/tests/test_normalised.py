"""Normalised rewards while those of several steps are pending, and how much of a group outlives a run."""

import asyncio
import random
import statistics
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlcore_reward_loop import build
from rlcore_reward_loop.running import RunningStatistics, Scale
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore import Scope
from rlcore.config import RewardFunctionConfig
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.testing.service import ScriptedService, ServiceAnswer, ServiceCall, serving
from rlcore.types import Lane, ScoredTrajectory, Trajectory

GROUP_SIZE = 4


@pytest.mark.slow
@given(st.data())
@settings(max_examples=80, deadline=None)
def test_all_samples_of_a_group_are_normalised_alike_in_whatever_order_rewards_and_steps_come(
    data: st.DataObject,
) -> None:
    """Against plain lists: a step's groups count from its end on, once each, when all of their samples are in."""
    scores = data.draw(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=4, max_size=8))
    answers = [(group, sample) for group in range(len(scores)) for sample in range(3)]
    order = data.draw(st.permutations(answers))
    steps_after = data.draw(st.sets(st.integers(0, len(order))))
    starts = sorted(data.draw(st.lists(st.integers(0, 3), min_size=len(scores), max_size=len(scores))))
    found, counted, seen = RunningStatistics(), list[int](), dict[tuple[int, int], float]()
    scales: dict[int, tuple[float, float]] = {}

    def plain() -> tuple[float, float]:
        return (statistics.mean(counted), statistics.pstdev(counted) or 1.0) if counted else (0.0, 1.0)

    for now, (group, sample) in enumerate(order):
        for place in range(len(scores)):
            if place not in scales and (starts[place] <= now or place == group):
                scales[place] = plain()
                found.begin(f"p/{place}", found.scale())
        seen[group, sample] = scores[group][sample]
        mean, deviation = scales[group]
        expected = (scores[group][sample] - mean) / deviation
        assert found.answered(f"p/{group}", sample, scores[group][sample]) == pytest.approx(expected, abs=1e-9)
        if sum(key[0] == group for key in seen) == 3:
            found.complete(f"p/{group}")
        if now in steps_after:
            whole = [index for index in range(len(scores)) if sum(key[0] == index for key in seen) == 3]
            counted += [seen.pop((sample, index)) for sample in whole for index in range(3)]  # type: ignore[misc]
            assert found.state()["count"] == len(counted)
            found.step()
            assert (found.mean, found.deviation) == pytest.approx(plain(), abs=1e-9)


def test_a_failed_sample_does_not_count_with_its_group() -> None:
    found = RunningStatistics()
    found.begin("p/0", Scale())
    found.answered("p/0", 0, 4.0)
    found.step()
    assert found.count == 0, "its other sample is pending"
    found.answered("p/0", 1, None)
    found.step()
    assert found.count == 0, "its reward has further parts"
    found.complete("p/0")
    found.step()
    assert (found.count, found.mean) == (1, 4.0)


def test_what_a_stop_cuts_off_does_not_count_for_it_will_be_asked_again() -> None:
    found = RunningStatistics()
    for group in ("p/0", "p/1"):
        found.begin(group, Scale())
        found.answered(group, 0, 4.0)
    found.answered("p/1", 1, 6.0)
    found.complete("p/1")
    found.end({"p/0", "p/1"})
    assert found.state()["count"] == 2
    found.step()
    assert (found.count, found.mean) == (2, 5.0)


def test_statistics_are_those_of_all_earlier_steps_in_any_order_of_arrival() -> None:
    rng = random.Random(0)
    steps = [[rng.gauss(3, 2) for _ in range(size)] for size in (5, 1, 30)]
    one, other = RunningStatistics(), RunningStatistics()
    assert one.scale().normalised(4.0) == 4.0
    seen: list[float] = []
    for number, step in enumerate(steps):
        for sample, score in enumerate(step):
            one.answered(f"p/{number}", sample, score)
        for sample, score in reversed(list(enumerate(step))):
            other.answered(f"p/{number}", sample, score)
        if seen:
            expected = (4 - statistics.mean(seen)) / statistics.pstdev(seen)
            assert one.scale().normalised(4.0) == pytest.approx(expected)
        restored = RunningStatistics()
        restored.restore(one.state())
        one.step()
        other.step()
        seen += step
        assert one.state() == other.state() == restored.state()


def normalised(url: str) -> RewardLoopSettings:
    reward = RewardSettings(served_by="scorer", normalise=True)
    return RewardLoopSettings(rewards={"liked": reward}, services={"scorer": ServiceSettings(urls=(url,))})


def test_a_step_that_ends_while_a_group_of_the_next_is_pending_does_not_split_the_group(tmp_path: Path) -> None:
    """Group 1 scores 5, 5, 5, 5: half before the end of the step of group 0, half after it."""
    completions = {0: ["1", "2", "3", "4"], 1: ["5"] * GROUP_SIZE}

    async def run(url: str) -> list[float]:
        manager = build(reward_context({}, tmp_path, section=normalised(url)))
        halfway = asyncio.Event()

        async def stream(group: int) -> AsyncIterator[Trajectory]:
            for sample, text in enumerate(completions[group]):
                if group == 1 and sample == GROUP_SIZE // 2:
                    await halfway.wait()
                yield make_trajectory(group, sample, text=text)

        async def scored(group: int, until: int = GROUP_SIZE) -> list[ScoredTrajectory]:
            found: list[ScoredTrajectory] = []
            async with aclosing(manager.score(stream(group), Lane.TRAIN)) as results:  # type: ignore[type-var]
                async for result in results:
                    found.append(result)
                    if len(found) == GROUP_SIZE // 2 and group == 1:
                        assert manager.metrics()["reward/liked/running_mean"] == 2.5, "the step of group 0 ends"
                        halfway.set()
            return found

        try:
            await manager.start()
            async with asyncio.timeout(20):
                await scored(0)
                late = await scored(1)
            assert manager.metrics()["reward/liked/running_mean"] == (1 + 2 + 3 + 4 + 5 * 4) / 8
        finally:
            await manager.close()
        return [sample.reward.score for sample in late]

    with serving(lambda call: ServiceAnswer({"score": float(call.json()["completion"])})) as service:
        assert asyncio.run(run(service.url)) == [5.0] * GROUP_SIZE


def test_a_group_counts_when_all_parts_of_its_rewards_are_in(tmp_path: Path) -> None:
    """A checkpoint made before that has none of the group, and the resumed run scores it again."""

    async def run(fast: ScriptedService, slow: ScriptedService, answer: threading.Event) -> None:
        section = normalised(fast.url)
        rewards = {**section.rewards, "late": RewardSettings(served_by="slow")}
        services = {**section.services, "slow": ServiceSettings(urls=(slow.url,))}
        manager = build(reward_context({}, tmp_path, section=RewardLoopSettings(rewards, services)))
        group = [make_trajectory(0, sample, text="5") for sample in range(GROUP_SIZE)]
        try:
            await manager.start()
            scoring = asyncio.create_task(score_all(manager, group))
            while fast.num_answered < GROUP_SIZE or slow.num_open < GROUP_SIZE:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert manager.metrics()["reward/liked/running_mean"] == 0.0
            assert manager.state()["liked"]["count"] == 0
            answer.set()
            await scoring
            assert manager.state()["liked"]["count"] == GROUP_SIZE
        finally:
            await manager.close()

    answer = threading.Event()

    async def late(call: ServiceCall) -> ServiceAnswer:
        while not answer.is_set():
            await asyncio.sleep(0.01)
        return ServiceAnswer({"score": 1})

    with serving(lambda call: ServiceAnswer({"score": 5})) as fast, serving(late) as slow:
        asyncio.run(run(fast, slow, answer))


SCOPES: dict[str, tuple[dict[str, Any], str, Scope]] = {
    "samples": ({}, "sample", Scope.SAMPLE),
    "a group's service": ({"scope": "group"}, "sample", Scope.GROUP),
    "a batch's service": ({"scope": "batch"}, "group", Scope.BATCH),
    "a group's function": ({}, "group", Scope.GROUP),
    "post-processing": ({"post_process": "own.py:ranks"}, "sample", Scope.GROUP),
    "one scale for a group": ({"normalise": True}, "sample", Scope.GROUP),
}


@pytest.mark.parametrize("name", SCOPES)
def test_the_scope_of_the_manager_is_the_widest_of_its_parts(name: str, tmp_path: Path) -> None:
    reward, function_scope, expected = SCOPES[name]
    section = normalised("http://127.0.0.1:9/")
    section = replace(section, rewards={"liked": RewardSettings(served_by="scorer", **reward)})
    functions = {"own": RewardFunctionConfig(fn="own.py:own", scope=function_scope)}  # type: ignore[arg-type]
    manager = build(reward_context(functions, tmp_path, section=section))
    assert manager.scope is expected
