"""Aggregates token losses into the loss of a mini-batch, with one weight per row.

The loss is the sum over rows b of weights_B[b] * sum over masked t of loss_BT[b, t]. The weights contain every
denominator, counted over the whole *global* mini-batch: any split over micro-batches or ranks gives partial losses with
the same sum. Entropy and a KL term are aggregated with the same weights.

A sample of several segments is ONE sequence. A sample without a loss token (nothing sampled, or masked as truncated) is
treated as absent from the mini-batch: it has weight 0 and counts in no denominator.
"""

from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.types import Float32s, Int64s

Mode = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_constant"]


def row_weights(
    mode: Mode, num_sampled_B: npt.NDArray[np.integer], sample_B: Int64s, constant: float = 1.0
) -> Float32s:
    """(B,) weight of each token's loss in the loss of the mini-batch, per row; `num_sampled_B` counts loss tokens.

    With N tokens, S samples that have any, and n tokens of the row's sample in all its segments:
    token_mean 1 / N (arXiv 2503.14476, eq. 8); seq_mean_token_mean 1 / (S n) (arXiv 2402.03300, eq. 3);
    seq_mean_token_sum 1 / S; token_sum_constant 1 / (S constant) (arXiv 2503.20783). All 0 without tokens.
    """
    num_sampled_B = np.asarray(num_sampled_B, dtype=np.int64)
    _, index_B = np.unique(sample_B, return_inverse=True)
    tokens_of_sample_S = np.bincount(index_B, weights=num_sampled_B)
    num_samples = max(1, int((tokens_of_sample_S > 0).sum()))
    if mode == "token_mean":
        divisor_B = np.full(len(num_sampled_B), max(1, int(num_sampled_B.sum())), dtype=np.float64)
    elif mode == "seq_mean_token_mean":
        divisor_B = num_samples * np.maximum(1.0, tokens_of_sample_S[index_B])
    elif mode == "seq_mean_token_sum":
        divisor_B = np.full(len(num_sampled_B), num_samples, dtype=np.float64)
    elif mode == "token_sum_constant":
        divisor_B = np.full(len(num_sampled_B), num_samples * constant, dtype=np.float64)
    else:
        assert_never(mode)
    return np.where(num_sampled_B > 0, 1.0 / divisor_B, 0.0).astype(np.float32)


def weighted_sum(values_BT: Tensor, mask_BT: Tensor, weights_B: Tensor) -> Tensor:
    """The scalar sum over b of weights_B[b] times the sum over masked t of values_BT[b, t].

    The sums of the micro-batches of a mini-batch add up to its loss. Values outside the mask affect neither value nor
    gradient.
    """
    return (torch.where(mask_BT, values_BT, 0.0).sum(1) * weights_B).sum()
