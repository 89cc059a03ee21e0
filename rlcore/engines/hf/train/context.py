"""Context parallelism: the ranks of a group hold slices of each packed sequence.

All layers but attention treat tokens independently, so each rank computes its slice. For attention the ranks exchange
tokens for heads: each gets all tokens of its share of the heads, and returns them afterwards (Ulysses, arXiv
2309.14509). Tokens are assigned round-robin, which balances loss tokens over the ranks.

Letters: N tokens of the packed sequence, n those of one rank, M loss tokens, m those of one rank, H heads of queries,
K heads of keys, D size of a head, R ranks of the group, S kinds of scores.
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.engines.hf.train.tree_attention import Tree, attend
from rlcore.types import Int64s


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """This process among the ranks that hold slices of the same sequences."""

    rank: int
    num: int
    group: Any
    """The process group of torch.distributed."""


@dataclass(frozen=True, eq=False)
class SlicedTree:
    """The keys that each token attends to, if every rank has every `num`th token."""

    tree: Tree
    length: int
    """Tokens of the whole sequence, without padding of the last slices."""
    context: ContextGroup

    @property
    def longest(self) -> int:
        """Tokens on the longest way down the tree; 0: unknown."""
        return self.tree.longest

    def attend(self, query_1HnD: Tensor, key_1KnD: Tensor, value_1KnD: Tensor, scale: float | None) -> Tensor:
        """(1, H, n, D) attention of this rank's tokens; all ranks of the group must call this.

        Keys and values are repeated if the ranks outnumber or do not divide their heads. ValueError for query heads
        that the ranks do not divide, and as `rlcore.engines.hf.train.tree_attention.attend`.
        """
        num, heads = self.context.num, query_1HnD.shape[1]
        if heads % num:
            raise ValueError(f"found {heads} heads of attention, which {num} ranks do not divide")
        if value_1KnD.shape != key_1KnD.shape:
            raise ValueError(
                f"its values have the shape {tuple(value_1KnD.shape)} and its keys {tuple(key_1KnD.shape)}"
            )
        repeats = lcm(key_1KnD.shape[1], num) // key_1KnD.shape[1]
        keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key_1KnD, value_1KnD))
        dealt = [torch.unflatten(tensor[0], 0, (num, -1)) for tensor in (query_1HnD, keys, values)]
        sizes = [tensor.shape[1] for tensor in dealt]
        arrived: Tensor = _Exchange.apply(torch.cat(dealt, dim=1), self.context)  # type: ignore[no-untyped-call]
        # Token i of rank r is the sequence's token i * R + r.
        whole = arrived.permute(1, 2, 0, 3).flatten(1, 2)[None, :, : self.length]
        query_1HND, key_1KND, value_1KND = torch.split(whole, sizes, dim=1)
        output_1HND = attend(query_1HND, key_1KND, value_1KND, self.tree, scale)
        added = query_1HnD.shape[2] * num - self.length
        filled = torch.nn.functional.pad(output_1HND[0], (0, 0, 0, added))
        by_rank = torch.unflatten(filled, 1, (-1, num)).permute(2, 0, 1, 3)
        returned: Tensor = _Exchange.apply(by_rank, self.context)  # type: ignore[no-untyped-call]
        return returned.flatten(0, 1)[None]


@dataclass(frozen=True, eq=False)
class Slice:
    """One rank's part of a packed sequence."""

    tokens_n: Int64s
    """Positions of its tokens in the sequence; -1 for padding."""
    chosen_m: Int64s
    """Indices of its loss tokens, which its tokens predict. All ranks have equally many, so each has a gradient of the
    output layer: surplus entries repeat the first loss token, and their scores are discarded."""
    predict_m: Int64s
    """Index, among its tokens, of the token that predicts each of these."""
    gathered_M: Int64s
    """Index of each loss token in the concatenated m of all ranks."""
    context: ContextGroup

    def whole(self, scores_Sm: Tensor) -> Tensor:
        """(S, M) scores of all loss tokens, on every rank; all ranks of the group must call this.

        Every rank computes the same loss from them, so the gradient of its scores is that of the loss, and the weights'
        gradients sum over the ranks to those of a single process.
        """
        if not len(self.gathered_M):
            return scores_Sm
        places_M = device_tensor(self.gathered_M, scores_Sm.device)
        scores_SM: Tensor = _Gather.apply(scores_Sm, places_M, self.context)  # type: ignore[no-untyped-call]
        return scores_SM


def slice_of(num_tokens: int, predict_M: Int64s, context: ContextGroup) -> Slice:
    """The slice of a rank; `predict_M` are the positions that predict loss tokens."""
    rank, num = context.rank, context.num
    size = -(-num_tokens // num)
    tokens_n = np.arange(size) * num + rank
    rank_M = predict_M % num
    most = int(np.bincount(rank_M, minlength=num).max())
    gathered_M = np.zeros_like(predict_M)
    for index in range(num):
        held = np.flatnonzero(rank_M == index)
        gathered_M[held] = index * most + np.arange(len(held))
    own = np.flatnonzero(rank_M == rank)
    fill = np.zeros(most - len(own), dtype=np.int64)
    return Slice(
        np.where(tokens_n < num_tokens, tokens_n, -1),
        np.concatenate([own, fill]),
        np.concatenate([predict_M[own] // num, fill]),
        gathered_M,
        context,
    )


class _Exchange(torch.autograd.Function):
    """All-to-all over (R, ...): part r goes to rank r, and arriving parts are in rank order."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return _exchanged(parts, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchanged(grad, ctx.context), None


def _exchanged(parts: Tensor, context: ContextGroup) -> Tensor:
    arrived = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
    dist.all_to_all_single(arrived, parts.contiguous(), group=context.group)
    return arrived


class _Gather(torch.autograd.Function):
    """All-gather of each rank's (S, m) into (S, M)."""

    @staticmethod
    def forward(ctx: Any, own_Sm: Tensor, places_M: Tensor, context: ContextGroup) -> Tensor:
        own_Sm = own_Sm.contiguous()
        pieces = [torch.empty_like(own_Sm) for _ in range(context.num)]
        dist.all_gather(pieces, own_Sm, group=context.group)
        ctx.save_for_backward(places_M)
        ctx.context, ctx.size = context, own_Sm.shape[1]
        return torch.cat(pieces, dim=1).index_select(1, places_M)

    @staticmethod
    def backward(ctx: Any, grad_SM: Tensor) -> Any:
        (places_M,) = ctx.saved_tensors
        size, context = ctx.size, ctx.context
        everything = grad_SM.new_zeros(len(grad_SM), size * context.num).index_copy(1, places_M, grad_SM)
        return everything[:, context.rank * size : (context.rank + 1) * size], None, None
