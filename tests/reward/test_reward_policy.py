"""Consequences of failed rewards."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlcore.config import RewardConfig, RewardFunctionConfig
from rlcore.contracts.scorer import Outcome, failed
from rlcore.errors import RewardError
from rlcore.reward.combine import combine
from rlcore.reward.outcome import outcome_of_one
from rlcore.reward.policy import Budget, apply_failures
from rlcore.reward.step_metrics import reward_metrics
from rlcore.testing.rewards import make_trajectory
from rlcore.types import FrozenDict, Metrics, Reward, RewardStatus, ScoredTrajectory


def config(budget: float = 1.0, **policies: str) -> RewardConfig:
    """Functions of these names with these policies and weight 2, failing with value -1."""
    functions = {
        name: RewardFunctionConfig("x:y", weight=2.0, on_failure=policy, failure_value=-1.0)  # type: ignore[arg-type]
        for name, policy in policies.items()
    }
    return RewardConfig(functions=functions, error_budget_frac=budget)


def fails(*names: str, **parts: float) -> Reward:
    """A reward of which these functions failed."""
    errors = dict.fromkeys(names, "it broke")
    info = FrozenDict[str, Any]({"error": "; ".join(f"{name}: it broke" for name in names), "failed": errors})
    return Reward(0.0, FrozenDict(parts), RewardStatus.FAILED, info=info)


def group(prompt: int, *rewards: Reward | float) -> list[ScoredTrajectory]:
    """A group with these rewards."""
    return [
        ScoredTrajectory(make_trajectory(prompt, sample), reward if isinstance(reward, Reward) else Reward(reward))
        for sample, reward in enumerate(rewards)
    ]


def remaining(
    groups: list[list[ScoredTrajectory]], config: RewardConfig
) -> tuple[list[list[ScoredTrajectory]], Metrics]:
    """The groups of a whole step that remain, and counts."""
    return apply_failures(groups, config, Budget(0, config))


def scores(groups: list[list[ScoredTrajectory]]) -> list[list[float]]:
    return [[sample.reward.score for sample in group] for group in groups]


def test_the_value_of_a_failed_function_is_its_component() -> None:
    [[valued, _]], _ = remaining([group(0, fails("f", g=0.5), 1.0)], config(f="value", g="abort"))
    assert valued.reward.score == 2.0 * -1.0 + 2.0 * 0.5
    assert dict(valued.reward.components) == {"g": 0.5, "f": -1.0}


@pytest.mark.parametrize("policy", ["drop_sample", "retry"])
def test_a_dropped_sample_is_absent_and_changes_nothing_else(policy: str) -> None:
    groups = [group(0, 1.0, fails("f"), 0.0), group(1, 0.5, 0.25)]
    kept, counts = remaining(groups, config(f=policy))
    assert kept == [[groups[0][0], groups[0][2]], groups[1]], "the very same samples, untouched"
    assert counts == {
        "reward/dropped_samples": 1.0,
        "reward/dropped_groups": 0.0,
        "reward/dropped_siblings": 0.0,
        "reward/valued_samples": 0.0,
        "reward/small_groups": 0.0,
    }


def test_a_group_left_with_one_sample_or_none_is_counted() -> None:
    groups = [group(0, 1.0, fails("f")), group(1, fails("f"), fails("f"))]
    kept, counts = remaining(groups, config(f="drop_sample"))
    assert scores(kept) == [[1.0]]
    assert (counts["reward/dropped_samples"], counts["reward/small_groups"]) == (3.0, 2.0)


def test_drop_group_removes_the_siblings_and_counts_them() -> None:
    kept, counts = remaining([group(0, 1.0, fails("f"), 0.0), group(1, 0.5, 0.25)], config(f="drop_group"))
    assert scores(kept) == [[0.5, 0.25]]
    assert (counts["reward/dropped_groups"], counts["reward/dropped_siblings"]) == (1.0, 2.0)


def test_value_puts_the_configured_score_in_place_of_the_missing_one() -> None:
    kept, counts = remaining([group(0, fails("f", other=3.0), 1.0)], config(f="value", other="drop_sample"))
    assert scores(kept) == [[2.0 * -1.0 + 2.0 * 3.0, 1.0]]
    assert kept[0][0].reward.status is RewardStatus.OK
    assert kept[0][0].reward.info["error"] == "f: it broke", "why stays on record"
    assert counts["reward/valued_samples"] == 1.0


def test_value_replaces_a_score_and_leaves_the_token_scores_of_the_others() -> None:
    tokens: Any = np.arange(len(make_trajectory().token_ids), dtype=np.float32)
    good, broken = Outcome(RewardStatus.OK, 3.0, token_scores=tokens), failed("it broke")
    reward = combine({"other": good, "f": broken}, {"other": 2.0, "f": 2.0}, 0.0)
    kept, _ = remaining([group(0, reward)], config(f="value", other="drop_sample"))
    assert scores(kept) == [[2.0 * 3.0 + 2.0 * -1.0]]
    found = kept[0][0].reward.token_scores
    assert found is not None
    assert found.tolist() == (2.0 * tokens).tolist()


def test_token_scores_that_fail_their_function_are_not_among_those_that_stay() -> None:
    tokens: Any = np.ones(len(make_trajectory().token_ids), dtype=np.float32)
    good, huge = Outcome(RewardStatus.OK, 3.0, token_scores=tokens), Outcome(RewardStatus.OK, 1.0, token_scores=tokens)
    reward = combine({"other": good, "f": huge}, {"other": 2.0, "f": 1e31}, 0.0)
    assert reward.status is RewardStatus.FAILED
    assert reward.token_scores is not None
    assert reward.token_scores.tolist() == (2.0 * tokens).tolist()


def test_the_strongest_policy_of_the_functions_that_failed_counts() -> None:
    policies = {"v": "value", "s": "drop_sample", "g": "drop_group", "a": "abort"}
    assert scores(remaining([group(0, fails("v", "s"), 1.0)], config(**policies))[0]) == [[1.0]]
    assert remaining([group(0, fails("s", "g"), 1.0)], config(**policies))[0] == []
    with pytest.raises(RewardError, match="reward of sample 0 of prompt 'test/0': g: it broke; a: it broke"):
        remaining([group(0, fails("g", "a"), 1.0)], config(**policies))
    unknown = Reward(0.0, status=RewardStatus.FAILED)
    assert scores(remaining([group(0, unknown, 1.0)], config(**policies))[0]) == [[1.0]]


def test_all_parts_of_a_sample_share_its_fate() -> None:
    parts = [ScoredTrajectory(make_trajectory(0, 0, segment=part, num_segments=2), fails("f")) for part in (0, 1)]
    kept, counts = remaining([[*parts, ScoredTrajectory(make_trajectory(0, 1), Reward(1.0))]], config(f="drop_sample"))
    assert scores(kept) == [[1.0]]
    assert counts["reward/dropped_samples"] == 1.0


def test_the_error_budget_counts_samples_and_names_the_first_causes() -> None:
    groups = [group(prompt, *([fails("f")] * (prompt == 0)), *([1.0] * (8 - (prompt == 0)))) for prompt in range(2)]
    remaining(groups, config(0.0625, f="drop_sample"))
    more = [group(0, fails("f"), fails("g"), fails("f"), *[1.0] * 13)]
    with pytest.raises(RewardError, match=r"3 of 16 samples failed.*f: it broke \(x2\); g: it broke \(x1\)"):
        remaining(more, config(0.125, f="drop_sample", g="value"))
    remaining([group(0, fails("f"), 1.0)], config(0.1, f="drop_sample"))
    with pytest.raises(RewardError, match="1 of 2 samples failed"):
        remaining([group(0, fails("f"), 1.0)], config(0.0, f="drop_sample"))


def test_reward_metrics_are_over_samples_that_did_not_fail() -> None:
    ok = [Reward(score, FrozenDict({"f": score}), latency_s=score) for score in (0.0, 1.0, 1.0)]
    skipped = Reward(2.0, FrozenDict({"g": 2.0}), latency_s=2.0, info=FrozenDict({"skipped": ["f"]}))
    scored = [
        *group(0, ok[0], ok[1], fails("f", g=5.0)),
        *group(1, ok[2], ok[2]),
        *group(2, skipped),
    ]
    metrics = reward_metrics(scored)
    assert metrics == pytest.approx(
        {
            "reward/failed": 1.0,
            "reward/skipped": 1.0,
            "time/reward/latency_p50_s": 1.0,
            "time/reward/latency_p95_s": 1.75,
            "reward/mean": 1.0,
            "reward/std": (2 / 5) ** 0.5,
            "reward/zero_std_frac": 0.5,
            "reward/f/mean": 0.75,
            "reward/g/mean": 3.5,
        }
    )


def test_an_entry_of_a_function_is_no_sign_that_one_skipped_the_sample() -> None:
    entries = outcome_of_one({"score": 1.0, "skipped": 0, "failed": 2, "note": 3}, 1, may_skip=False)
    [row] = group(0, combine({"f": entries}, {"f": 1.0}, 0.0))
    assert dict(row.reward.info) == {"f/skipped": 0, "f/failed": 2, "note": 3}
    assert reward_metrics([row])["reward/skipped"] == 0.0
    assert reward_metrics([row])["reward/f/skipped/mean"] == 0.0, "it is a number that the function logs"


def test_groups_that_differ_in_token_scores_alone_are_not_equal() -> None:
    def with_tokens(*sums: float) -> list[ScoredTrajectory]:
        rows = group(0, *[Reward(0.5)] * len(sums))
        return [
            replace(row, reward=replace(row.reward, token_scores=row.trajectory.loss_mask * np.float32(total)))
            for row, total in zip(rows, sums, strict=True)
        ]

    assert reward_metrics(with_tokens(1.0, 0.0))["reward/zero_std_frac"] == 0.0
    assert reward_metrics(with_tokens(1.0, 1.0))["reward/zero_std_frac"] == 1.0


def test_parts_of_a_sample_count_once_and_nothing_is_a_number_over_nothing() -> None:
    parts = [ScoredTrajectory(make_trajectory(0, 0, segment=part), Reward(4.0)) for part in range(3)]
    assert reward_metrics([*parts, *group(0, 0.0, 1.0)[1:]])["reward/mean"] == 2.5
    assert reward_metrics([]) == {"reward/failed": 0.0, "reward/skipped": 0.0}
    assert "reward/mean" not in reward_metrics(group(0, fails("f")))


def test_a_failed_part_without_a_policy_counts_as_drop_sample_also_where_a_function_has_the_policy_value() -> None:
    kept, counts = remaining([group(0, 1.0, fails("f", "judge"), 0.0)], config(f="value"))
    assert scores(kept) == [[1.0, 0.0]]
    assert (counts["reward/dropped_samples"], counts["reward/valued_samples"]) == (1.0, 0.0)
