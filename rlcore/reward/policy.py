"""Applies failure policies to the complete groups of a step. Pure.

A sample whose reward FAILED carries the errors by function in `info['failed']`; each function's `on_failure` says what
follows, and the strongest one counts: abort, drop_group, drop_sample (also what `retry` ends in), value. Parts of the
reward that are not a configured function bring their policy in `info['on_failure']`; a failure without either counts
as drop_sample.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlcore.config import RewardConfig
from rlcore.errors import RewardError
from rlcore.types import FrozenDict, Metrics, Reward, RewardStatus, ScoredTrajectory, TrajectoryId

STRENGTH = {"value": 0, "drop_sample": 1, "retry": 1, "drop_group": 2, "abort": 3}
NUM_CAUSES = 3


def apply_failures(
    groups: Sequence[Sequence[ScoredTrajectory]], config: RewardConfig, budget: "Budget"
) -> tuple[list[list[ScoredTrajectory]], Metrics]:
    """The remaining groups to train on, and counts.

    Under drop_sample only the failed sample is removed; a group with fewer than two remaining samples stays, and is
    counted in reward/small_groups. RewardError when the step's `budget` is spent, or under the policy abort.
    """
    budget.spend(groups)
    counts = dict.fromkeys(
        ("dropped_samples", "dropped_groups", "dropped_siblings", "valued_samples", "small_groups"), 0.0
    )
    kept: list[list[ScoredTrajectory]] = []
    for group in groups:
        if all(sample.reward.status is RewardStatus.OK for sample in group):
            if group:
                kept.append(list(group))
            continue
        units = {sample.trajectory.id.unit(): sample.reward for sample in group}
        decisions = {unit: failure_policy(reward, config) for unit, reward in units.items()}
        if "drop_group" in decisions.values():
            num_failed = sum(1 for decision in decisions.values() if decision)
            counts["dropped_groups"] += 1
            counts["dropped_samples"] += len(units)
            counts["dropped_siblings"] += len(units) - num_failed
            continue
        dropped = {unit for unit, decision in decisions.items() if decision in ("drop_sample", "retry")}
        counts["dropped_samples"] += len(dropped)
        counts["valued_samples"] += sum(1 for decision in decisions.values() if decision == "value")
        left = [_valued(sample, decisions, config) for sample in group if sample.trajectory.id.unit() not in dropped]
        if left:
            kept.append(left)
        if dropped and len(units) - len(dropped) < 2:
            counts["small_groups"] += 1
    return kept, {f"reward/{name}": value for name, value in counts.items()}


def failure_policy(reward: Reward, config: RewardConfig) -> str:
    """The failure policy for a sample with this reward: an `on_failure`, or '' when it did not fail."""
    if reward.status is RewardStatus.OK:
        return ""
    others = reward.info.get("on_failure", {})
    policies = [
        config.functions[name].on_failure if name in config.functions else "drop_sample"
        for name in reward.info.get("failed", {})
        if name not in others
    ]
    return max([*policies, *others.values()], key=STRENGTH.__getitem__, default="drop_sample")


class Budget:
    """The error budget of a step, whose groups may arrive in several parts."""

    def __init__(self, num_samples: int, config: RewardConfig) -> None:
        """`num_samples`: the least number that the step will have; groups that replace others are further ones."""
        self._least, self._config = num_samples, config
        self._num_samples = 0
        self._failures: list[Reward] = []

    def spend(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """Count the failures of further groups.

        RewardError if one has the policy abort, or if more samples of the step failed than `reward.error_budget_frac`
        allows.
        """
        rows = [row for group in groups for row in group]
        self._num_samples += sum([row.trajectory.id.segment == 0 for row in rows])
        failed = {row.trajectory.id.unit(): row.reward for row in rows if row.reward.status is not RewardStatus.OK}
        for unit, reward in failed.items():
            if failure_policy(reward, self._config) == "abort":
                raise aborted(unit, reward)
        self._failures += failed.values()
        num_samples = max(self._least, self._num_samples)
        if len(self._failures) > allowed_failures(num_samples, self._config):
            raise over_budget(self._failures, num_samples, self._config)


def allowed_failures(num_samples: int, config: RewardConfig) -> int:
    """The number of a step's samples that may fail: the budget's share, at least one unless the budget is 0."""
    frac = config.error_budget_frac
    return max(1, int(frac * num_samples + 1e-9)) if frac > 0 else 0


def aborted(unit: TrajectoryId, reward: Reward) -> RewardError:
    """The error of the policy abort."""
    return RewardError(
        f"reward of sample {unit.sample} of prompt '{unit.prompt}': {reward.info.get('error', 'no cause given')}; "
        "the function that failed has on_failure=abort"
    )


def over_budget(failures: Sequence[Reward], num_samples: int, config: RewardConfig) -> RewardError:
    """The error of a spent budget: names the functions with their most frequent causes."""
    return RewardError(
        f"reward: {len(failures)} of {num_samples} samples failed, more than reward.error_budget_frac="
        f"{config.error_budget_frac:g} of a step allows: {causes(failures)}; put the cause right, or raise the budget"
    )


def causes(failures: Iterable[Reward]) -> str:
    """The most frequent errors, each with its function and count."""
    counted = Counter(str(reward.info.get("error", "no cause given")) for reward in failures)
    return "; ".join(f"{error} (x{times})" for error, times in counted.most_common(NUM_CAUSES))


def _valued(scored: ScoredTrajectory, decisions: dict[TrajectoryId, str], config: RewardConfig) -> ScoredTrajectory:
    """The sample with `failure_value` as the score and the component of each function that failed, under the policy
    value.

    The token scores of the other functions stay.
    """
    reward = scored.reward
    if decisions[scored.trajectory.id.unit()] != "value":
        return scored
    scores = {name: score for name, score in reward.components.items() if name in config.functions}
    scores |= {name: config.functions[name].failure_value for name in reward.info["failed"]}
    total = sum(config.functions[name].weight * score for name, score in scores.items())
    total += reward.info.get("others_score", 0.0)
    parts = FrozenDict({**reward.components, **scores})
    return replace(scored, reward=replace(reward, score=total, components=parts, status=RewardStatus.OK))
