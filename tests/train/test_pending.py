"""A pass matches by id, whatever the order of arrival."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.errors import PluginError
from rlcore.runtime.checked_components import CheckedAgent, CheckedRewards
from rlcore.train.pending import Group, PendingGroup, collect
from rlcore.train.tasks import task_seed, tasks_for
from rlcore.types import FinishReason, Lane, Prompt, Reward, Sampling, ScoredTrajectory, Trajectory, TrajectoryId


def make_prompt(name: str) -> Prompt:
    return Prompt(name, ({"role": "user", "content": name},), None, "test")


def make_trajectory(prompt: Prompt, sample: int, part: int = 0) -> Trajectory:
    ids = np.array([1, 2, 3], dtype=np.int32)
    return Trajectory(
        id=TrajectoryId(prompt.id, 0, sample, part),
        prompt=prompt,
        token_ids=ids,
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        completion="x",
        finish=FinishReason.STOP,
        versions=((1, 0),),
    )


class ShuffledAgent(AgentLoop):
    def __init__(self, order: random.Random) -> None:
        self.order = order

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        rows = [make_trajectory(task.prompt, sample) for task in tasks for sample in range(task.n)]
        self.order.shuffle(rows)
        for row in rows:
            await asyncio.sleep(0)
            yield row


class NamedRewards(RewardManager):
    """Scores a trajectory with a number made of its id; delivers in another order than it received."""

    def __init__(self, order: random.Random) -> None:
        self.order = order

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        rows = [row async for row in stream]
        self.order.shuffle(rows)
        for row in rows:
            yield ScoredTrajectory(row, Reward(score_of(row.id)))


def score_of(row: TrajectoryId) -> float:
    return float(int(row.prompt) * 100 + row.sample)


@pytest.mark.slow
def test_groups_come_in_the_order_of_tasks_with_their_own_rewards_for_any_arrival_order() -> None:
    tasks = tasks_for([(make_prompt(str(number)), 0) for number in (3, 1, 2)], n=4, seed=0)
    for seed in range(50):
        order = random.Random(seed)
        groups, sampled_s = asyncio.run(
            collect(ShuffledAgent(order), NamedRewards(order), tasks, Sampling(), Lane.TRAIN)
        )
        ids = [[(s.trajectory.id.prompt, s.trajectory.id.sample) for s in group] for group in groups]
        assert ids == [[(name, sample) for sample in range(4)] for name in ("3", "1", "2")]
        assert all(s.reward.score == score_of(s.trajectory.id) for group in groups for s in group)
        assert 0.0 < sampled_s < 30.0


class Listed(AgentLoop):
    """Yields these rows, whatever the tasks are."""

    def __init__(self, *rows: Trajectory) -> None:
        self.rows = rows

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        for row in self.rows:
            yield row


class Repeating(RewardManager):
    """Scores each trajectory `times` times."""

    def __init__(self, times: int) -> None:
        self.times = times

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        async for row in stream:
            for _ in range(self.times):
                yield ScoredTrajectory(row, Reward(0.0))


def collected(agent: AgentLoop, reward: RewardManager) -> list[Group]:
    """The groups of two samples of prompt '1', with the components behind the checks that they have in a run."""
    checked = cast(AgentLoop, CheckedAgent(agent, "agent")), cast(RewardManager, CheckedRewards(reward, "reward"))
    tasks = tasks_for([(make_prompt("1"), 0)], n=2, seed=0)
    groups, _ = asyncio.run(collect(*checked, tasks, Sampling(), Lane.TRAIN))
    return groups


def test_a_missing_a_foreign_and_a_repeated_trajectory_are_each_named() -> None:
    prompt = make_prompt("1")
    rows = [make_trajectory(prompt, sample) for sample in range(2)]
    assert [len(group) for group in collected(Listed(*rows), Repeating(1))] == [2]
    with pytest.raises(PluginError, match=r"agent: .*ended without samples \[1\] of the 2 of prompt '1'"):
        collected(Listed(rows[0]), Repeating(1))
    with pytest.raises(PluginError, match=r"agent: .*which no task asked for"):
        collected(Listed(*rows, make_trajectory(make_prompt("9"), 0)), Repeating(1))
    with pytest.raises(PluginError, match=r"reward: .*scored twice"):
        collected(Listed(*rows), Repeating(2))
    with pytest.raises(PluginError, match=r"reward: .*ended without 2 of the 2 trajectories"):
        collected(Listed(*rows), Repeating(0))


def test_parts_of_a_sample_stay_together_in_order() -> None:
    prompt = make_prompt("1")
    rows = [make_trajectory(prompt, *place) for place in ((1, 1), (0, 0), (1, 0))]
    (group,) = collected(Listed(*(replace(row, num_segments=0) for row in rows)), Repeating(1))
    assert [(s.trajectory.id.sample, s.trajectory.id.segment) for s in group] == [(0, 0), (1, 0), (1, 1)]


def test_the_seed_of_a_group_depends_on_its_names_alone() -> None:
    seeds = {task_seed(seed, prompt, epoch) for seed in (0, 1) for prompt in ("a", "b") for epoch in (0, 1)}
    assert len(seeds) == 8
    assert task_seed(0, "a", 0) == task_seed(0, "a", 0)


@pytest.mark.parametrize(
    ("scored", "keep_partial", "kept"),
    [((0, 3), True, [0]), ((0, 1, 2, 3), True, [0, 1]), ((0, 3), False, []), ((0, 1, 2, 3), False, [])],
)
def test_a_group_that_became_smaller_keeps_the_rewards_of_its_first_samples_alone(
    scored: Sequence[int], keep_partial: bool, kept: list[int]
) -> None:
    """None if rewards depend on the whole group, which was another."""
    (task,) = tasks_for([(make_prompt("1"), 0)], n=2, seed=0)
    group = PendingGroup(task, 0, 1, 0)
    rows = [ScoredTrajectory(make_trajectory(task.prompt, sample), Reward(0.0)) for sample in scored]
    group.restore(rows, keep_partial)
    assert [row.trajectory.id.sample for row in group.group()] == kept
    assert group.ready == (len(kept) == 2)
