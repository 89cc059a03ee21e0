"""The way `tree`: the prefixes and suffixes of a micro-batch as one sequence without padding.

Letters: B rows, T positions, G groups, N tokens of the packed sequence, M loss tokens, H hidden size.

Only attention knows the tree: a token of a suffix sees the prefix of its group and its own suffix. The sequence has all
prefixes first, then all suffixes, a group's suffixes side by side. So the tokens that attend to prefixes, and the
prefixes that they attend to, are each one stretch of it: groups that lack either of the two stand at its ends.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.data.batch import shared_prefixes, suffix_lengths
from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.engines.hf.train.tree_attention import Spans, Tree, attend
from rlcore.types import Batch, Int64s

TREE_ATTENTION = "rlcore_tree"
"""The name of the attention implementation that understands a `Tree`."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of a micro-batch that predictions need, each once."""

    token_ids_N: Tensor
    positions_N: Tensor
    """Position of each token in its row."""
    tree: Tree
    predict_M: Tensor
    """Place of the hidden state from which each loss token is predicted."""


def pack(batch: Batch, device: torch.device) -> PackedBatch:
    """The rows of a micro-batch with the prefix of each group stored once.

    A row's last loss token, and what follows it, is left out: nothing is predicted from it. A group of one row has no
    prefix; the whole row is its suffix.
    """
    tokens = batch.tokens
    _, first_G, num_rows_G = np.unique(batch.group_B, return_index=True, return_counts=True)
    prefix_B = np.where(num_rows_G[batch.group_B] == 1, 0, shared_prefixes(batch))
    suffix_B = suffix_lengths(batch, prefix_B)
    if not (prefix_B + suffix_B).any():
        suffix_B[0] = 1  # transformers computes no empty sequence
    prefix_G = prefix_B[first_G]
    shared_G = np.bincount(batch.group_B, weights=suffix_B, minlength=len(first_G)).astype(np.int64)
    # Groups of nothing but a prefix, of both, of nothing but suffixes; in a group equal lengths side by side.
    kind_G = np.where(shared_G == 0, 0, np.where(prefix_G > 0, 1, 2))
    groups = np.argsort(kind_G, kind="stable")
    rows = np.lexsort((-suffix_B, batch.group_B, kind_G[batch.group_B]))
    prefixes, both = groups[prefix_G[groups] > 0], groups[kind_G[groups] == 1]
    rows = rows[suffix_B[rows] > 0]
    lengths = np.concatenate([prefix_G[prefixes], suffix_B[rows]])
    own, queries, keys = (tuple(some.tolist()) for some in (lengths, shared_G[both], prefix_G[both]))
    num_prefix, num_alone = int(prefix_G.sum()), int(prefix_G[kind_G == 0].sum())
    tree = Tree(
        own=Spans(0, own, 0, own, causal=True, device=device),
        shared=Spans(num_prefix, queries, num_alone, keys, causal=False, device=device),
    )
    starts = np.cumsum(lengths) - lengths
    starts_G, starts_B = np.zeros_like(prefix_G), np.zeros_like(prefix_B)
    starts_G[prefixes], starts_B[rows] = np.split(starts, [len(prefixes)])
    row_N = np.repeat(np.concatenate([first_G[prefixes], rows]), lengths)
    begin_N = np.repeat(np.concatenate([np.zeros_like(prefixes), prefix_B[rows]]) - starts, lengths)
    positions_N = np.arange(len(row_N)) + begin_N
    row_M, position_M = np.nonzero(tokens.loss_mask_BT)
    before_M = position_M - 1
    after_M = before_M - prefix_B[row_M]
    predict_M = np.where(after_M < 0, starts_G[batch.group_B[row_M]] + before_M, starts_B[row_M] + after_M)

    def tensor(array: Int64s) -> Tensor:
        return device_tensor(array.astype(np.int64), device)

    return PackedBatch(tensor(tokens.token_ids_BT[row_N, positions_N]), tensor(positions_N), tree, tensor(predict_M))


def tree_hidden(transformer: Any, packed: PackedBatch) -> Tensor:
    """(M, H) hidden states that predict the loss tokens.

    The model's attention implementation must be `TREE_ATTENTION`, until after the backward pass.
    """
    hidden_1NH = transformer.base_model(
        input_ids=packed.token_ids_N[None], position_ids=packed.positions_N[None], use_cache=False, tree=packed.tree
    ).last_hidden_state
    return torch.index_select(hidden_1NH[0], 0, packed.predict_M)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed sequence of prefixes and suffixes; transformers calls it once per layer.

    `query` is (1, heads, N, size), `key` and `value` have the heads of the keys; the result is (1, N, heads, size).
    ValueError for a sliding window and for capped scores, which it does not compute.
    """
    if sliding_window is not None or softcap is not None:
        raise ValueError(f"its attention has sliding_window={sliding_window} and softcap={softcap}")
    return attend(query, key, value, tree, scaling).transpose(1, 2), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The packed sequence has no mask of [N, N]."""


@lru_cache(maxsize=1)
def register_tree_attention() -> None:
    """Make `TREE_ATTENTION` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
