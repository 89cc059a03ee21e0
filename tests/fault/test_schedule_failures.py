"""Failed rewards under every schedule, and prompts that a stopped run left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import RewardError
from rlcore.report import metrics
from rlcore.testing.causes import NUM, PROMPTS, SAMPLES, Script, chance, played
from rlcore.types import FrozenDict, Reward, RewardStatus, Trajectory

pytestmark = pytest.mark.fault

SCHEDULES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "streamed": {"schedule.stream_minibatches": "true"},
    "one step off": {"schedule.max_staleness": 1},
    "both": {"schedule.max_staleness": 1, "schedule.stream_minibatches": "true"},
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def failing(num: int, **info: Any) -> Callable[[Trajectory], Reward]:
    """The first sample of each of `num` prompts fails."""
    prompts: dict[str, None] = {}

    def score(row: Trajectory) -> Reward:
        prompts.setdefault(row.id.prompt)
        if row.id.sample == 0 and row.id.prompt in list(prompts)[:num]:
            failed = FrozenDict[str, Any]({"error": "as asked", **info})
            return Reward(0.0, status=RewardStatus.FAILED, info=failed)
        return chance(row)

    return score


def trained(directory: Path, step: int = 1) -> list[dict[str, Any]]:
    """The rows of a step that have an advantage."""
    return [row for row in metrics.read_trajectories(directory, step) if row["advantage"] is not None]


@schedules
def test_the_error_budget_is_a_share_of_the_step_whatever_the_manager_checks(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    budget = {"reward.error_budget_frac": 0.2}  # of 6 samples: one
    played(tmp_path / "within", Script(score=failing(1)), 1, schedule, budget)
    assert len(trained(tmp_path / "within")) == NUM - 1
    with pytest.raises(RewardError, match=r"2 of 6 samples failed, more than reward\.error_budget_frac=0\.2"):
        played(tmp_path / "beyond", Script(score=failing(2)), 1, schedule, budget)


@schedules
def test_abort_ends_the_run_with_the_first_failure(schedule: dict[str, Any], tmp_path: Path) -> None:
    script = Script(score=failing(1, on_failure={"judge": "abort"}))
    with pytest.raises(RewardError, match="on_failure=abort"):
        played(tmp_path, script, 1, schedule, {"reward.error_budget_frac": 1})


@schedules
@pytest.mark.parametrize(("policy", "left"), [("drop_sample", NUM - 1), ("drop_group", NUM - SAMPLES)])
def test_what_is_dropped_is_not_trained_on_and_the_rest_is(
    policy: str, left: int, schedule: dict[str, Any], tmp_path: Path
) -> None:
    script = Script(score=failing(1, on_failure={"judge": policy}))
    events = played(tmp_path, script, 1, schedule, {"reward.error_budget_frac": 1})
    assert sum(len(minibatch) for minibatch in events.minibatches) == len(trained(tmp_path)) == left
    assert len(metrics.read_trajectories(tmp_path, 1)) == NUM
    [row] = events.trainer.history
    assert row["reward/dropped_samples"] == NUM - left
    assert row["reward/dropped_groups"] == float(policy == "drop_group")
    assert events.count("updated") == PROMPTS - (policy == "drop_group")


@schedules
def test_a_step_whose_every_reward_failed_is_taken_without_an_update(schedule: dict[str, Any], tmp_path: Path) -> None:
    def score(row: Trajectory) -> Reward:
        return Reward(0.0, status=RewardStatus.FAILED, info=FrozenDict[str, Any]({"error": "as asked"}))

    events = played(tmp_path, Script(score=score), 2, schedule, {"reward.error_budget_frac": 1})
    assert (events.count("updated"), events.count("published")) == (0, 2)
