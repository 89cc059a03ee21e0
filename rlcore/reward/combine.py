"""The outcomes of all functions for one sample become its reward."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlcore.reward.outcome import Outcome
from rlcore.types import Float32s, FrozenDict, Reward, RewardStatus


def combine(
    outcomes: Mapping[str, Outcome],
    weights: Mapping[str, float],
    latency_s: float,
    policies: Mapping[str, str] | None = None,
) -> Reward:
    """The weighted sum over the functions that had an opinion.

    FAILED when a function failed or all skipped; then `info['failed']` maps each failed function to its error, the
    score is 0.0, and the parts that did come are kept. `info['skipped']` lists functions without an opinion. With
    several functions their info is found as '<name>/<key>'; 'answer' is that of the first that extracted one.
    `policies` are the failure policies of parts that `reward.functions` does not know: a failed reward keeps those of
    the parts that failed in `info['on_failure']`, and the weighted sum of the others in `info['others_score']`.
    """
    opinions = {name: each for name, each in outcomes.items() if each.status is RewardStatus.OK}
    errors = {name: each.error for name, each in outcomes.items() if each.status is RewardStatus.FAILED}
    parts: dict[str, float] = {}
    for name, each in opinions.items():
        parts[name] = each.score
        for part, score in each.parts.items():
            parts[f"{name}/{part}"] = score
    info = _info(outcomes)
    if errors or not opinions:
        info["error"] = "; ".join(f"{name}: {error}" for name, error in errors.items()) or "every function skipped it"
        info["failed"] = errors
        if policies:
            info["on_failure"] = {name: policy for name, policy in policies.items() if name in errors}
            info["others_score"] = sum(
                weights[name] * each.score for name, each in opinions.items() if name in policies
            )
        return Reward(0.0, FrozenDict(parts), RewardStatus.FAILED, None, latency_s, FrozenDict(info))
    score = sum(weights[name] * each.score for name, each in opinions.items())
    total: Float32s | None = None
    for name, each in opinions.items():
        if each.token_scores is not None:
            weighted = np.float32(weights[name]) * each.token_scores
            total = weighted if total is None else total + weighted
    return Reward(score, FrozenDict(parts), RewardStatus.OK, total, latency_s, FrozenDict(info))


def _info(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for name, each in outcomes.items():
        info |= {key if len(outcomes) == 1 else f"{name}/{key}": value for key, value in each.info.items()}
        if "answer" in each.info:
            info.setdefault("answer", each.info["answer"])
    skipped = [name for name, each in outcomes.items() if each.status is RewardStatus.SKIPPED]
    return info | {"skipped": skipped} if skipped else info
