"""Which tokens the weights of one version sampled."""

from collections.abc import Sequence

import numpy as np

from rlcore.types import Bools, Trajectory


def sampled_with(trajectories: Sequence[Trajectory], version: int) -> Bools:
    """(B, T) loss tokens that weights of `version` sampled (`Trajectory.versions`), T those of the longest row."""
    longest = max((len(each.token_ids) for each in trajectories), default=0)
    sampled_BT = np.zeros((len(trajectories), longest), dtype=np.bool_)
    for row, each in enumerate(trajectories):
        ends = [start for start, _ in each.versions[1:]] + [len(each.token_ids)]
        for (start, of), end in zip(each.versions, ends, strict=True):
            if of == version:
                sampled_BT[row, start:end] = each.loss_mask[start:end]
    return sampled_BT
