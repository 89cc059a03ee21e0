"""The error budget is a share of a step's samples, whichever rounds and passes they come in."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import AlgoConfig, RewardConfig, RolloutConfig, RunConfig, ScheduleConfig, TrainConfig
from rlcore.contracts.scorer import Outcome, Scorer, failed
from rlcore.errors import RewardError
from rlcore.report import metrics
from rlcore.reward.functions import FunctionRewards
from rlcore.reward.policy import Budget, apply_failures
from rlcore.testing.causes import PROMPTS, Script, played
from rlcore.testing.here import HereChildren
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.types import FrozenDict, Lane, Reward, RewardStatus, ScoredTrajectory, Trajectory

FAILED = Reward(0.0, status=RewardStatus.FAILED, info=FrozenDict[str, Any]({"error": "it broke"}))


def group(prompt: int, num_failed: int) -> list[ScoredTrajectory]:
    """A group of eight samples."""
    rewards = [FAILED if sample < num_failed else Reward(1.0) for sample in range(8)]
    return [ScoredTrajectory(make_trajectory(prompt, sample), reward) for sample, reward in enumerate(rewards)]


def test_groups_that_replace_others_spend_the_budget_of_their_step() -> None:
    config = RewardConfig()
    budget = Budget(16 * 8, config)
    apply_failures([group(prompt, int(prompt < 10)) for prompt in range(16)], config, budget)
    kept, counts = apply_failures([group(16, 2)], config, budget)
    assert (len(kept[0]), counts["reward/dropped_samples"]) == (6, 2.0)
    with pytest.raises(RewardError, match=r"reward: 15 of 144 samples failed, .*: it broke \(x15\); put the cause"):
        apply_failures([group(17, 3)], config, budget)


def test_a_replaced_group_may_fail_as_a_whole_where_the_step_allows_it(tmp_path: Path) -> None:
    """Rewards of the first prompt are equal, those of its replacement failed, and a third prompt is trained on."""
    order: list[str] = []

    def score(row: Trajectory) -> Reward:
        if row.id.prompt not in order:
            order.append(row.id.prompt)
        place = order.index(row.id.prompt)
        return FAILED if place == PROMPTS else Reward(float(row.id.sample * (place > 0)))

    settings = {"algo.dynamic_sampling": "true", "reward.error_budget_frac": 0.34}
    played(tmp_path, Script(score=score), 1, settings)
    [step] = [record for record in metrics.read(tmp_path) if "data/resample_rounds" in record]
    assert (step["data/resample_rounds"], step["reward/failed"]) == (2.0, 2.0)


class Broken(Scorer):
    """Fails the samples with the text 'bad'."""

    name = "broken"

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        return [
            failed("it broke") if trajectory.text() == "bad" else Outcome(RewardStatus.OK, 1.0)
            for trajectory in trajectories
        ]


DROPPING = {"schedule": ScheduleConfig(max_staleness=2, on_stale="drop")}
RESAMPLING = {"algo": AlgoConfig(dynamic_sampling=True, max_resample_rounds=3)}
PASSES: dict[str, tuple[dict[str, Any], int, int]] = {
    "one step": ({}, 8, 1),
    "one step, where others wait": ({"schedule": ScheduleConfig(max_staleness=2)}, 8, 1),
    "three steps that may share the failures": (DROPPING, 24, 3),
    "a step that may replace its prompts": (RESAMPLING, 8, 3),
}


@pytest.mark.parametrize("num_more", [0, 1])
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_fails_when_no_step_could_allow_its_failures(name: str, num_more: int, tmp_path: Path) -> None:
    """Two prompts of four samples are a step, of which one sample may fail."""
    settings, num_samples, num_allowed = PASSES[name]
    config = RunConfig(rollout=RolloutConfig(samples_per_prompt=4), train=TrainConfig(prompts_per_step=2), **settings)
    texts = ["bad"] * (num_allowed + num_more) + ["good"] * (num_samples - num_allowed - num_more)
    trajectories = [make_trajectory(index // 4, index % 4, text) for index, text in enumerate(texts)]

    async def run() -> list[ScoredTrajectory]:
        manager = FunctionRewards(reward_context({}, tmp_path, HereChildren(), config=config), [Broken()])
        await manager.start()
        try:
            return await score_all(manager, trajectories)
        finally:
            await manager.close()

    expected: AbstractContextManager[Any] = pytest.raises(RewardError) if num_more else nullcontext()
    with expected:
        assert sum(row.reward.status is RewardStatus.FAILED for row in asyncio.run(run())) == num_allowed
