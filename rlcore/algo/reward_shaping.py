"""Shapes rewards and rows before advantages: truncated responses, groups without signal."""

import math
from collections.abc import Sequence

import numpy as np

from rlcore.errors import ConfigError, RewardError
from rlcore.types import Bools, Float32s, Int64s, ScoredTrajectory, total_rewards


def length_penalty(
    num_sampled_B: Int64s, sample_B: Int64s, max_tokens: int, buffer: int, penalty: float = 1.0
) -> Float32s:
    """(B,) addend to each row's reward: 0 up to max_tokens - buffer sampled tokens, then down to -penalty.

    Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), linear over the buffer, -penalty from max_tokens on. The
    length is the number of sampled tokens in all segments of the row's sample. ConfigError when the buffer is not
    between 1 and max_tokens.
    """
    if not 1 <= buffer <= max_tokens:
        raise ConfigError(f"algo.overlong_buffer={buffer}: needs 1 to rollout.max_tokens={max_tokens}")
    _, index_B = np.unique(sample_B, return_inverse=True)
    length_B = np.bincount(index_B, weights=num_sampled_B)[index_B]
    excess_B = np.clip((length_B - (max_tokens - buffer)) / buffer, 0.0, 1.0)
    return (0.0 - penalty * excess_B).astype(np.float32)


def keeps_loss(truncated_B: Bools, sample_B: Int64s) -> Bools:
    """(B,) False for all rows of a sample if any of them was truncated (overlong filtering, arXiv 2503.14476, 3.4).

    Such rows get weight 0: `row_weights(mode, np.where(keep_B, num_sampled_B, 0), ...)`. They still count in the
    statistics of their group.
    """
    _, index_B = np.unique(sample_B, return_inverse=True)
    truncated_rows_S = np.bincount(index_B, weights=truncated_B)
    keeps_S: Bools = truncated_rows_S == 0
    return keeps_S[index_B]


def rewards_all_equal(groups: Sequence[Sequence[ScoredTrajectory]]) -> list[bool]:
    """True for each group that dynamic sampling replaces (arXiv 2503.14476, section 3.2).

    Such a group has no two rewards that differ in float32, so every group estimator would give it advantage 0. The
    reward of a sample is its score plus the sum of its token scores. Failed samples do not count; a group with fewer
    than two others is True. RewardError for a reward that is not finite, because it equals no other.
    """
    return [_num_distinct(group) < 2 for group in groups]


def _num_distinct(group: Sequence[ScoredTrajectory]) -> int:
    rewards = total_rewards(group)
    for unit, found in rewards.items():
        if not math.isfinite(found):
            raise RewardError(f"dynamic sampling: the reward of {unit} is {found}; needs a finite number")
    return len({float(np.float32(found)) for found in rewards.values()})
