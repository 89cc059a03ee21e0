"""The estimator `gdpo`, which normalises the score of each reward function before it sums them.

Shape letters as in `rlcore.algo.advantage`; F functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rlcore.algo.advantage import STD_EPSILON, AdvantageInputs, grpo
from rlcore.errors import RewardError
from rlcore.types import Float32s, ReadOnlyArrays, ScoredTrajectory

CANCELS = 1e-6
"""Largest share of the functions' advantages that a sum of 0 leaves: scores are float32."""

_MAGNIFIED = 2.0**40
"""Makes the epsilon of `grpo` vanish; a power of two does not round."""


@dataclass(frozen=True, eq=False)
class FunctionScores(ReadOnlyArrays):
    """The scores of the reward functions, for estimators that need more than their sum."""

    scores_BF: Float32s
    """The unweighted score of each function for the row's sample; NaN where the function skipped it."""
    weights_F: Float32s


def function_scores(rows: Sequence[ScoredTrajectory], weights: Mapping[str, float]) -> FunctionScores:
    """The scores of the functions with these weights, in the order of the rows.

    RewardError for token scores, which no function's score contains.
    """
    for row in rows:
        if row.reward.token_scores is not None:
            raise RewardError(
                f"reward of {row.trajectory.id}: found token_scores, but the estimator of this run compares the score "
                "of each reward function, which has none of them; return them in the score, or choose an estimator of "
                "the sum, such as algo.advantage=grpo"
            )
    scores = [[row.reward.components.get(name, np.nan) for name in weights] for row in rows]
    return FunctionScores(
        np.array(scores, dtype=np.float32).reshape(len(rows), len(weights)),
        np.array(list(weights.values()), dtype=np.float32),
    )


def gdpo(inputs: AdvantageInputs) -> Tensor:
    """(B,) weighted sum over the reward functions of each one's `grpo` advantage, normalised over the batch.

    GDPO, arXiv 2601.05242. Rewards whose sums are equal differ if the functions disagree, and a function with large
    scores does not drown the others: its weight alone says how much it counts. A function that skipped a sample adds 0
    to its advantage, and its mean and standard deviation are over the others. The sum is divided by its standard
    deviation over the samples of the batch plus 1e-6; both standard deviations have denominator n - 1. The mean over
    the batch, which the paper subtracts, is 0, because each group's is. Exactly 0 in a group in which no function's
    scores differ, and in a batch in all of whose samples the functions cancel each other: where without the epsilon of
    `grpo` no sum exceeds 1e-6 of the largest sum of absolute values. ValueError without the functions' scores.
    """
    if inputs.scores_BF is None or inputs.weights_F is None:
        raise ValueError("gdpo: needs scores_BF and weights_F, the scores and weights of the reward functions")
    sums_B = torch.zeros_like(inputs.rewards_B, dtype=torch.float64)
    exact_B, absolute_B = torch.zeros_like(sums_B), torch.zeros_like(sums_B)
    for scores_B, weight in zip(inputs.scores_BF.double().T, inputs.weights_F.tolist(), strict=True):
        rows_N = (~scores_B.isnan()).nonzero()[:, 0]
        scored = AdvantageInputs(
            scores_B[rows_N], inputs.group_B[rows_N], inputs.sample_B[rows_N], inputs.lengths_B[rows_N]
        )
        sums_B[rows_N] += weight * grpo(scored)
        alone_N = weight * grpo(replace(scored, rewards_B=scored.rewards_B * _MAGNIFIED))
        exact_B[rows_N] += alone_N
        absolute_B[rows_N] += alone_N.abs()
    not_finite_B = inputs.rewards_B * 0.0  # NaN there, else 0
    if len(sums_B) and exact_B.abs().max() <= CANCELS * absolute_B.max():
        return not_finite_B + 0.0  # divided by its own deviation, a rest of rounding would teach as much as a signal
    samples, sample_B = torch.unique(inputs.sample_B, return_inverse=True)
    sums_S = sums_B.new_zeros(len(samples)).index_copy_(0, sample_B, sums_B)  # equal in all rows of a sample
    std = (sums_S.square().sum() / max(1, len(samples) - 1)).sqrt()
    return (sums_B / (std + STD_EPSILON)).to(inputs.rewards_B.dtype) + not_finite_B
