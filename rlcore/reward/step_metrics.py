"""Metrics of a step's rewards."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rlcore.types import Metrics, RewardStatus, ScoredTrajectory, total_rewards


def reward_metrics(scored: Sequence[ScoredTrajectory]) -> Metrics:
    """Statistics over samples (a sample's parts count once).

    reward/mean and reward/std (population) are over the samples that did not fail; reward/<function>/mean over those
    that the function did not skip; reward/zero_std_frac is the share of groups, of those with at least two samples that
    did not fail, in which all rewards, token scores included, are equal: they teach nothing. reward/failed counts
    samples, reward/skipped those that some function skipped; the latency percentiles are seconds from the end of
    generation to the reward, waiting included. A number over nothing is left out.
    """
    units = [(sample.trajectory.id, sample.reward) for sample in scored]
    rewards = {(unit.prompt, unit.epoch, unit.sample): reward for unit, reward in units}
    scores: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    num_failed = num_skipped = 0
    for reward in rewards.values():
        num_failed += reward.status is RewardStatus.FAILED
        num_skipped += "skipped" in reward.info
        for name, score in reward.components.items():
            parts[name].append(score)
        if reward.status is RewardStatus.OK:
            scores.append(reward.score)
    metrics: Metrics = {"reward/failed": float(num_failed), "reward/skipped": float(num_skipped)}
    if rewards:
        latencies = sorted([reward.latency_s for reward in rewards.values()])
        metrics["time/reward/latency_p50_s"] = _percentile(latencies, 0.5)
        metrics["time/reward/latency_p95_s"] = _percentile(latencies, 0.95)
    if scores:
        scores_N = np.array(scores)
        metrics["reward/mean"] = float(scores_N.mean())
        metrics["reward/std"] = float(scores_N.std())
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for unit, total in total_rewards(scored).items():
        groups[unit.prompt, unit.epoch].append(total)
    comparable = [group for group in groups.values() if len(group) > 1]
    if comparable:
        metrics["reward/zero_std_frac"] = sum(map(_all_equal, comparable)) / len(comparable)
    return metrics | {f"reward/{name}/mean": sum(part) / len(part) for name, part in parts.items()}


def _all_equal(scores: Sequence[float]) -> bool:
    """True if all are the same finite number; NaN is never equal."""
    return max(scores) == min(scores) and math.isfinite(sum(scores))


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile of sorted numbers, interpolated between neighbours; numpy's function would dominate the time here."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
