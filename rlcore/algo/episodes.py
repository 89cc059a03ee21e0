"""The sampled tokens of a batch, sample by sample; tokens that the policy did not sample are left out.

The segments of a sample follow each other in the order of its rows (`rlcore.data.batch.collate` sorts rows by segment).
Shape letters beyond those of `rlcore.types`: S samples that have sampled tokens, N sampled tokens of the batch, L
sampled tokens of the longest sample. Written in numpy: an operation on a few numbers takes a fifth of the time it takes
in torch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.types import Bools, Int64s


@dataclass(frozen=True, eq=False)
class Episodes:
    """Positions of sampled tokens in the batch and in their samples, ordered by sample, then by time of sampling."""

    rows_N: Int64s
    columns_N: Int64s
    sample_N: Int64s
    """0 .. S - 1."""
    step_N: Int64s
    """Index of the token among the sampled tokens of its sample, from 0."""
    num_tokens_S: Int64s
    shape: tuple[int, int]
    """(B, T) of the batch."""

    def dense(self, values_BT: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """(L, S) float64: values of the sampled tokens, one column per sample; 0 after a sample's last token.

        A time step is contiguous in memory, so a loop back through time reads row by row.
        """
        dense_LS = np.zeros((int(self.num_tokens_S.max(initial=0)), len(self.num_tokens_S)))
        dense_LS[self.step_N, self.sample_N] = values_BT[self.rows_N, self.columns_N]
        return dense_LS

    def spread(self, dense_LS: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """(B, T) the inverse of `dense`; 0 where the policy did not sample."""
        values_BT = np.zeros(self.shape)
        values_BT[self.rows_N, self.columns_N] = dense_LS[self.step_N, self.sample_N]
        return values_BT

    def turn_N(self) -> Int64s:
        """(N,) the number of the token's turn in its sample, from 0: a turn is a run of sampled tokens in one row."""
        begins_N = np.ones(len(self.rows_N), dtype=np.int64)
        begins_N[1:] = (self.rows_N[1:] != self.rows_N[:-1]) | (self.columns_N[1:] != self.columns_N[:-1] + 1)
        number_N = begins_N.cumsum()
        first_S = self.num_tokens_S.cumsum() - self.num_tokens_S
        turn_N: Int64s = number_N - number_N[first_S[self.sample_N]]
        return turn_N

    def last_tokens(self) -> tuple[Int64s, Int64s]:
        """(S,) rows and (S,) columns of the last sampled token of each sample, in the order of sample numbers."""
        last_S = self.num_tokens_S.cumsum() - 1
        return self.rows_N[last_S], self.columns_N[last_S]


def episodes(loss_mask_BT: Bools, sample_B: Int64s) -> Episodes:
    """The sampled tokens of a batch, by sample; a sample without sampled tokens has no episode."""
    rows_N, columns_N = loss_mask_BT.nonzero()
    if (sample_B[1:] < sample_B[:-1]).any():
        order_N = np.argsort(sample_B[rows_N], kind="stable")
        rows_N, columns_N = rows_N[order_N], columns_N[order_N]
    samples_N = sample_B[rows_N]
    begins_N = np.ones(len(rows_N), dtype=np.bool_)
    begins_N[1:] = samples_N[1:] != samples_N[:-1]
    sample_N, first_S = begins_N.cumsum() - 1, begins_N.nonzero()[0]
    num_tokens_S = np.bincount(sample_N)
    step_N = np.arange(len(rows_N)) - first_S[sample_N]
    return Episodes(rows_N, columns_N, sample_N, step_N, num_tokens_S, (loss_mask_BT.shape[0], loss_mask_BT.shape[1]))
