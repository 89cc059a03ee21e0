"""Restricts the policy loss to the tokens at which the policy is least sure (arXiv 2506.01939)."""

import math
from dataclasses import replace

import numpy as np

from rlcore.algo.reward_shaping import keeps_loss
from rlcore.config import AlgoConfig
from rlcore.types import Batch, Bools, Metrics


def only_top_entropy(batch: Batch, algo: AlgoConfig) -> tuple[Batch, Metrics]:
    """The batch with advantages of 0 outside its tokens of highest entropy, and the entropy that divides them.

    The share `algo.top_entropy_quantile` of the tokens that have a loss, rounded up, keeps its advantages; tokens as
    high as the last of them keep theirs, too. Rows that `algo.overlong=mask` leaves without a weight are not counted.
    Denominators, returns of a critic, the KL term and the entropy bonus stay those of all tokens. Advantages become one
    per token. ValueError for a batch without entropies or advantages.
    """
    if batch.entropy_BT is None:
        raise ValueError("tokens are chosen by their entropy, and the batch has none")
    mask_BT = _with_loss(batch, algo)
    entropy_N = batch.entropy_BT[mask_BT]
    if not len(entropy_N):
        return batch, {}
    share = round(algo.top_entropy_quantile * len(entropy_N), 9)  # 0.28 * 50 is more than 14 as a float
    num = max(1, math.ceil(share))
    least = np.partition(entropy_N, -num)[-num]
    keeps_BT = mask_BT & (batch.entropy_BT >= least)
    if batch.advantages_BT is not None:
        kept_BT = np.where(keeps_BT, batch.advantages_BT, np.float32(0.0))
    elif batch.advantages_B is not None:
        kept_BT = np.where(keeps_BT, batch.advantages_B[:, None], np.float32(0.0))
    else:
        raise ValueError("advantages are restricted to some tokens, and the batch has none")
    return replace(batch, advantages_B=None, advantages_BT=kept_BT), {"policy/top_entropy": float(least)}


def _with_loss(batch: Batch, algo: AlgoConfig) -> Bools:
    mask_BT: Bools = batch.tokens.loss_mask_BT
    if algo.overlong != "mask" or batch.truncated_B is None:
        return mask_BT
    return mask_BT & keeps_loss(batch.truncated_B, batch.sample_B)[:, None]
