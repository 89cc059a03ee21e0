"""Evaluation: the metrics against brute force, the composition against small fakes."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import EvalConfig, RolloutConfig, RunConfig
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.train.evaluate import evaluate, majority, pass_at_k, source_metrics
from rlcore.types import (
    FinishReason,
    FrozenDict,
    Lane,
    Metrics,
    Prompt,
    Reward,
    RewardStatus,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    frozen_messages,
)


def trajectory(identity: TrajectoryId, prompt: Prompt, num_sampled: int) -> Trajectory:
    mask = np.arange(3 + num_sampled) >= 3
    return Trajectory(
        id=identity,
        prompt=prompt,
        token_ids=np.zeros(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), dtype=np.float32),
        completion="",
        finish=FinishReason.STOP,
        versions=((3, 0),),
    )


def prompt_of(source: str, index: int) -> Prompt:
    return Prompt(f"{source}/{index}", frozen_messages([{"role": "user", "content": f"{index}?"}]), index, source)


def group_of(*rewards: Reward, lengths: Sequence[int] | None = None) -> list[ScoredTrajectory]:
    prompt = prompt_of("math", 0)
    sizes = lengths or [1] * len(rewards)
    return [
        ScoredTrajectory(trajectory(TrajectoryId(prompt.id, 0, sample), prompt, size), reward)
        for sample, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
    ]


def ok(score: float, answer: Any = None) -> Reward:
    return Reward(score, info=FrozenDict({} if answer is None else {"answer": answer}))


FAILED = Reward(0.0, status=RewardStatus.FAILED)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_pass(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(map(any, subsets)), len(subsets))), abs=1e-12)


def test_pass_at_k_of_the_paper() -> None:
    # 1 - (1 - c/n) * (1 - c/(n-1)) for k = 2
    assert pass_at_k(200, 13, 2) == pytest.approx(1 - (187 / 200) * (186 / 199))
    assert pass_at_k(10, 0, 5) == 0.0
    assert pass_at_k(10, 6, 5) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_pass_at_k_of_too_few_samples_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(n, c, k)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_majority_is_the_most_frequent_answer_and_of_those_the_first_seen(answers: list[int]) -> None:
    expected, _ = Counter(answers).most_common(1)[0]  # of equal counts, Counter gives the first seen
    assert majority(answers) == answers.index(expected)
    unhashable = [[answer] for answer in answers]
    assert majority(unhashable) == answers.index(expected)


def test_majority_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        majority([])


def test_metrics_of_a_source_by_hand() -> None:
    groups = [
        group_of(ok(1.0, "4"), ok(0.0, "5"), ok(1.0, "4"), ok(0.25, "6"), lengths=[2, 4, 6, 8]),
        group_of(ok(0.0, "1"), ok(0.0, "1"), ok(1.0, "2"), ok(0.0, "3"), lengths=[1, 1, 1, 1]),
    ]
    assert source_metrics(groups, 4, 1.0) == {
        "num": 2.0,
        "failed": 0.0,
        "mean": pytest.approx(3.25 / 8),
        "length_mean": pytest.approx(24 / 8),
        "pass@1": pytest.approx((2 / 4 + 1 / 4) / 2),
        "pass@2": pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2),
        "pass@4": 1.0,
        "maj@4": 0.5,
    }
    assert source_metrics(groups, 4, 0.25)["pass@1"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert source_metrics(groups, 4, 0.25)["pass@2"] == pytest.approx((1.0 + 0.5) / 2)


def test_failed_rewards_are_counted_and_left_out() -> None:
    groups = [group_of(ok(1.0, 1), FAILED, ok(0.0, 2), lengths=[1, 7, 1]), group_of(FAILED, FAILED, FAILED)]
    assert source_metrics(groups, 3, 1.0) == {
        "num": 2.0,
        "failed": 4.0,
        "mean": 0.5,
        "length_mean": 2.0,
        "pass@1": 0.5,
        "pass@2": 1.0,
        "maj@3": 1.0,
    }
    assert source_metrics(groups[1:], 3, 1.0) == {"num": 1.0, "failed": 3.0, "length_mean": 1.0}
    assert source_metrics([], 3, 1.0) == {"num": 0.0, "failed": 0.0}


def test_maj_at_k_is_reported_only_when_every_sample_has_an_answer() -> None:
    assert source_metrics([group_of(ok(1.0, "a"), ok(1.0, "a"))], 2, 1.0)["maj@2"] == 1.0
    assert "maj@2" not in source_metrics([group_of(ok(1.0, "a"), ok(1.0))], 2, 1.0)


def test_a_sample_of_several_parts_counts_once() -> None:
    prompt = prompt_of("math", 0)
    reward, other = ok(1.0), ok(0.0)
    rows = [
        ScoredTrajectory(trajectory(TrajectoryId(prompt.id, 0, 0, part), prompt, size), reward)
        for part, size in ((0, 5), (1, 3))
    ]
    rows.append(ScoredTrajectory(trajectory(TrajectoryId(prompt.id, 0, 1), prompt, 4), other))
    metrics = source_metrics([rows], 2, 1.0)
    assert (metrics["mean"], metrics["length_mean"], metrics["pass@1"]) == (0.5, 6.0, 0.5)


def test_pass_at_powers_of_two_and_at_k() -> None:
    names = [name for name in source_metrics([group_of(*[ok(1.0)] * 6)], 6, 1.0) if name.startswith("pass")]
    assert names == ["pass@1", "pass@2", "pass@4", "pass@6"]


class RecordingAgent(AgentLoop):
    """Finishes trajectories in a random order; a sample's length is its index + 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[RolloutTask], Sampling, Lane]] = []

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        self.calls.append((list(tasks), sampling, lane))
        due = [(task, sample) for task in tasks for sample in range(task.n)]
        random.Random(7).shuffle(due)
        for task, sample in due:
            identity = TrajectoryId(task.prompt.id, task.epoch, sample)
            yield trajectory(identity, task.prompt, sample + 1)


class ScriptedReward(RewardManager):
    """Scores by a function of the trajectory."""

    def __init__(self, score: Callable[[Trajectory], Reward]) -> None:
        self.lanes: list[Lane] = []
        self._score = score

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        self.lanes.append(lane)
        async for completion in stream:
            yield ScoredTrajectory(completion, self._score(completion))


@dataclass(frozen=True)
class FakePlan:
    config: RunConfig


@dataclass(frozen=True)
class FakeRun:
    plan: FakePlan
    agent: RecordingAgent
    reward: ScriptedReward


def fake_run(score: Callable[[Trajectory], Reward], **settings: Any) -> FakeRun:
    rollout = RolloutConfig(temperature=0.7, max_tokens=33, stop=("\n",))
    return FakeRun(
        FakePlan(RunConfig(rollout=rollout, eval=EvalConfig(**settings))), RecordingAgent(), ScriptedReward(score)
    )


def is_even(trajectory: Trajectory) -> Reward:
    return ok(float((trajectory.prompt.answer + trajectory.id.sample) % 2 == 0), answer=trajectory.id.sample % 2)


HELDOUT: Mapping[str, Sequence[Prompt]] = {
    "math": [prompt_of("math", index) for index in range(3)],
    "code": [prompt_of("code", index) for index in range(2)],
}


def run_once(run: FakeRun, seed: int = 5) -> tuple[Metrics, tuple[ScoredTrajectory, ...]]:
    result = asyncio.run(evaluate(run, HELDOUT, seed))
    return result.metrics, result.rows


def test_each_source_is_reported_by_name_and_rows_come_in_canonical_order() -> None:
    metrics, rows = run_once(fake_run(is_even, samples_per_prompt=3))
    assert metrics == {
        "eval/math/num": 3.0,
        "eval/math/failed": 0.0,
        "eval/math/mean": pytest.approx(5 / 9),
        "eval/math/length_mean": 2.0,
        "eval/math/pass@1": pytest.approx((2 / 3 + 1 / 3 + 2 / 3) / 3),
        "eval/math/pass@2": pytest.approx((1 + 2 / 3 + 1) / 3),
        "eval/math/pass@3": 1.0,
        "eval/math/maj@3": pytest.approx(2 / 3),
        "eval/code/num": 2.0,
        "eval/code/failed": 0.0,
        "eval/code/mean": pytest.approx(3 / 6),
        "eval/code/length_mean": 2.0,
        "eval/code/pass@1": 0.5,
        "eval/code/pass@2": pytest.approx((1 + 2 / 3) / 2),
        "eval/code/pass@3": 1.0,
        "eval/code/maj@3": 0.5,
    }
    assert [(row.trajectory.id.prompt, row.trajectory.id.sample) for row in rows] == [
        (f"eval/{prompt.id}", sample) for prompts in HELDOUT.values() for prompt in prompts for sample in range(3)
    ]


def test_evaluation_uses_its_own_lane_sampling_and_names() -> None:
    run = fake_run(is_even, samples_per_prompt=2, temperature=0.0, top_p=0.9, top_k=5)
    run_once(run)
    ((tasks, sampling, lane),) = run.agent.calls
    assert sampling == Sampling(temperature=0.0, top_p=0.9, top_k=5, max_tokens=33, stop=("\n",))
    assert (lane, run.reward.lanes) == (Lane.EVAL, [Lane.EVAL])
    assert [task.prompt.id for task in tasks] == [
        "eval/math/0",
        "eval/math/1",
        "eval/math/2",
        "eval/code/0",
        "eval/code/1",
    ]
    assert {task.n for task in tasks} == {2}
    longer = fake_run(is_even, max_tokens=99)
    run_once(longer)
    assert longer.agent.calls[0][1].max_tokens == 99


def test_seeds_depend_on_seed_and_prompt_alone() -> None:
    run = fake_run(is_even)
    for seed in (5, 5, 6):
        run_once(run, seed)
    first, again, other = ([task.seed for task in tasks] for tasks, _, _ in run.agent.calls)
    assert first == again
    assert len(set(first)) == 5
    assert not set(first) & set(other)


def test_evaluation_touches_no_global_random_state() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    run_once(fake_run(is_even, samples_per_prompt=2))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index, union-attr]


def test_a_source_whose_rewards_all_failed_reports_that() -> None:
    metrics, rows = run_once(fake_run(lambda sample: FAILED if sample.prompt.source == "math" else is_even(sample)))
    assert metrics["eval/math/failed"] == 3.0
    assert "eval/math/mean" not in metrics
    assert metrics["eval/code/failed"] == 0.0
    assert len(rows) == 5
