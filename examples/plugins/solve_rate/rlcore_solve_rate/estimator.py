"""The estimator. Letters: B rows, G groups, S samples; a sample may have several rows."""

import torch
from torch import Tensor

from rlcore.algo.advantage import AdvantageInputs


def solve_rate(inputs: AdvantageInputs) -> Tensor:
    """(B,) the reward less its group's mean, times 4 p (1 - p) for p, the share of the group's samples above 0.

    The factor is 1 where half of a group has a reward above 0, and falls to 0 where all or none have.
    """
    rewards_B, group_B = inputs.rewards_B.double(), inputs.group_B
    _, sample_B, num_rows_S = inputs.sample_B.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    share_B = 1.0 / num_rows_S[sample_B].double()
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0

    def mean_B(values_B: Tensor) -> Tensor:
        """The mean over each row's group, in which a sample counts once."""
        sums_G = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group_B, values_B * share_B)
        counts_G = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group_B, share_B)
        return (sums_G / counts_G)[group_B]

    rate_B = mean_B((rewards_B > 0).double())
    advantages_B: Tensor = 4.0 * rate_B * (1.0 - rate_B) * (rewards_B - mean_B(rewards_B))
    return advantages_B.to(inputs.rewards_B.dtype)
