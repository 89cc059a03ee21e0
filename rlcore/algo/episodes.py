"""The sampled tokens of a batch, sample by sample: what the policy did, with everything it did not do left out.

A sample's parts follow one another as its rows stand in the batch (`rlcore.batch.collate` puts them in part order).
Shape letters beyond those of `rlcore.types`: S samples that have sampled tokens, N sampled tokens of the batch, L
sampled tokens of the longest sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Episodes:
    """Where the n-th sampled token stands, in the batch and in its sample; by sample, then in the order of sampling."""

    rows_N: Tensor
    columns_N: Tensor
    sample_N: Tensor
    """0 .. S - 1."""
    step_N: Tensor
    """Index among the sampled tokens of its sample, from 0."""
    num_tokens_S: Tensor
    shape: tuple[int, int]
    """(B, T) of the batch."""

    def dense(self, values_BT: Tensor) -> Tensor:
        """(S, L) the values of sampled tokens, each sample from its first; 0 after its last."""
        length = int(self.num_tokens_S.max()) if len(self.num_tokens_S) else 0
        dense_SL = values_BT.new_zeros(len(self.num_tokens_S), length)
        dense_SL[self.sample_N, self.step_N] = values_BT[self.rows_N, self.columns_N]
        return dense_SL

    def spread(self, dense_SL: Tensor) -> Tensor:
        """(B, T) the inverse of `dense`; 0 where the policy did not sample."""
        values_BT = dense_SL.new_zeros(self.shape)
        values_BT[self.rows_N, self.columns_N] = dense_SL[self.sample_N, self.step_N]
        return values_BT

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """(S,) rows and (S,) columns of the last sampled token of each sample, in the order of sample numbers."""
        last_N = self.step_N == self.num_tokens_S[self.sample_N] - 1
        return self.rows_N[last_N], self.columns_N[last_N]


def episodes(loss_mask_BT: Tensor, sample_B: Tensor) -> Episodes:
    """The sampled tokens of a batch, by sample; a sample of which nothing was sampled has no episode."""
    rows_N, columns_N = loss_mask_BT.nonzero(as_tuple=True)
    order_N = torch.argsort(sample_B[rows_N], stable=True)
    rows_N, columns_N = rows_N[order_N], columns_N[order_N]
    _, sample_N, num_tokens_S = torch.unique(sample_B[rows_N], return_inverse=True, return_counts=True)
    first_S = num_tokens_S.cumsum(0) - num_tokens_S
    step_N = torch.arange(len(rows_N), device=rows_N.device) - first_S[sample_N]
    shape = (loss_mask_BT.shape[0], loss_mask_BT.shape[1])
    return Episodes(rows_N, columns_N, sample_N, step_N, num_tokens_S, shape)
