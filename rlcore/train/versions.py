"""Maps tokens to the version of the weights that sampled them."""

from collections.abc import Sequence

import numpy as np

from rlcore.types import Bools, Trajectory


def sampled_with(trajectories: Sequence[Trajectory], version: int, *, alone: bool = False) -> Bools:
    """(B, T) loss tokens that weights of `version` sampled (`Trajectory.versions`), T those of the longest row.

    `alone`: only those of rows that were sampled with this version only.
    """
    longest = max((len(trajectory.token_ids) for trajectory in trajectories), default=0)
    sampled_BT = np.zeros((len(trajectories), longest), dtype=np.bool_)
    for row, trajectory in enumerate(trajectories):
        ends = [start for start, _ in trajectory.versions[1:]] + [len(trajectory.token_ids)]
        if alone and any(of != version for _, of in trajectory.versions):
            continue
        for (start, of), end in zip(trajectory.versions, ends, strict=True):
            if of == version:
                sampled_BT[row, start:end] = trajectory.loss_mask[start:end]
    return sampled_BT
