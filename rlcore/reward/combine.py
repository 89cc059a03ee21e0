"""Combines the outcomes of all functions for a sample into its reward."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlcore.contracts.scorer import Outcome
from rlcore.errors.redaction import LONGEST_LINE, clipped
from rlcore.types import Float32s, FrozenDict, Reward, RewardStatus

LARGEST_SUM = 1e30
"""The largest weighted sum of scores. Advantages are differences and multiples of sums, and float32."""

OURS = frozenset(("skipped", "failed", "on_failure", "others_score"))
"""Keys of a reward's info that say how its functions ended: none of them may write these."""


def combine(
    outcomes: Mapping[str, Outcome],
    weights: Mapping[str, float],
    latency_s: float,
    policies: Mapping[str, str] | None = None,
) -> Reward:
    """The weighted sum over the functions that did not skip the sample; 0 without functions.

    FAILED if a function failed or all skipped; then `info['failed']` maps each failed function to its error, the score
    is 0.0, and components and token scores of the others are kept, for the policy value. `info['skipped']` lists
    functions that skipped. With several functions their info has keys '<name>/<key>', as do keys of one function that
    are in `OURS`; 'answer' is from the first that extracted one. `policies` are the failure policies of components
    outside `reward.functions`: a failed reward keeps those of the failed components in `info['on_failure']`, and the
    weighted sum of the others in `info['others_score']`.
    """
    parts: dict[str, float] = {}
    errors: dict[str, str] = {}
    info: dict[str, Any] = {}
    skipped: list[str] = []
    score = others_score = 0.0
    total: Float32s | None = None
    alone = len(outcomes) == 1
    for name, outcome in outcomes.items():
        if outcome.info:
            info |= {
                key if alone and key not in OURS else f"{name}/{key}": value for key, value in outcome.info.items()
            }
            if "answer" in outcome.info:
                info.setdefault("answer", outcome.info["answer"])
        if outcome.status is RewardStatus.FAILED:
            errors[name] = clipped(outcome.error, LONGEST_LINE)  # the step keeps it, and foreign code wrote it
        elif outcome.status is RewardStatus.SKIPPED:
            skipped.append(name)
        else:
            parts[name] = outcome.score
            for part, value in outcome.components.items():
                parts[f"{name}/{part}"] = value
            weighted, token_scores = weights[name] * outcome.score, outcome.token_scores
            with_tokens = total if token_scores is None else _added(total, weights[name], token_scores)
            if not abs(score + weighted) <= LARGEST_SUM:
                errors[name] = (
                    f"its score {outcome.score:g} times its weight {weights[name]:g} lifts the sum beyond "
                    f"{LARGEST_SUM:g}: advantages would leave what a float32 holds"
                )
            elif with_tokens is not None and not (np.abs(with_tokens) <= LARGEST_SUM).all():
                errors[name] = f"its token scores times its weight {weights[name]:g} exceed {LARGEST_SUM:g}"
            else:
                score, total = score + weighted, with_tokens
                others_score += weighted if policies and name in policies else 0.0
    if skipped:
        info["skipped"] = skipped
    if not errors and (parts or not outcomes):
        return Reward(score, FrozenDict(parts), RewardStatus.OK, total, latency_s, FrozenDict(info))
    info["error"] = "; ".join(f"{name}: {error}" for name, error in errors.items()) or "every function skipped it"
    info["failed"] = errors
    if policies:
        info["on_failure"] = {name: policy for name, policy in policies.items() if name in errors}
        info["others_score"] = others_score
    return Reward(0.0, FrozenDict(parts), RewardStatus.FAILED, total, latency_s, FrozenDict(info))


def _added(total: Float32s | None, weight: float, token_scores: Float32s) -> Float32s:
    weighted: Float32s = np.float32(weight) * token_scores
    return weighted if total is None else total + weighted
