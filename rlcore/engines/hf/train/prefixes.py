"""The prompt of a group, computed once for all its samples: how rows are laid out for it, and their attention.

Letters: B rows, T positions, S positions of a row after its prefix, P positions of a prefix, G prefixes, N tokens that
are no padding, M loss tokens, K keys that a suffix may see (P + S), H hidden size.

A row's last loss token, and what follows it, is no input: nothing is predicted from it.

Two ways, one contract: the hidden states, and so the gradients, are those of the rows computed one by one.

`tree`: all prefixes and all suffixes as one sequence without padding. Only attention knows the tree: a token of a
suffix sees its prefix and its own suffix. `cache`: the prefixes first; their keys and values, graph included, are then
the cache of the suffixes. Both passes of it are padded.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlcore.data.batch import shared_prefixes, suffix_lengths
from rlcore.types import Batch, Bools, Int64s

TREE_ATTENTION = "rlcore_tree"
"""The name of the attention implementation that understands a `Layout`."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of a micro-batch's prefixes and suffixes stand."""

    token_ids_GP: Tensor
    token_ids_BS: Tensor
    positions_BS: Tensor
    """Position of each token of a suffix in its row; padding goes on counting."""
    prefix_of_B: Tensor
    """Which prefix a row begins with."""
    visible_BK: Tensor
    """True where the key, first of the prefix then of the suffix, is a token and no padding."""
    place_N: Tensor
    """Of each token that is no padding its place in [all of GP, then all of BS]; the order of the packed sequence."""
    gather_GP: Tensor
    """The inverse: where each place of GP stands in the packed sequence; padding points at its start."""
    gather_BS: Tensor
    num_padded: int
    """G * P: where the places of BS begin."""

    @property
    def packed_ids_N(self) -> Tensor:
        """The token ids of the packed sequence."""
        return torch.cat([self.token_ids_GP.flatten(), self.token_ids_BS.flatten()])[self.place_N]

    @property
    def packed_positions_N(self) -> Tensor:
        """The position in its row of each token of the packed sequence."""
        positions_GP = torch.arange(self.token_ids_GP.shape[1], device=self.place_N.device).expand_as(self.token_ids_GP)
        return torch.cat([positions_GP.flatten(), self.positions_BS.flatten()])[self.place_N]

    @property
    def mask_BSK(self) -> Tensor:
        """(B, S, K) which keys each token of a suffix sees; its own always, so that no softmax is empty."""
        longest = self.token_ids_BS.shape[1]
        keys = self.visible_BK.shape[1]
        causal_SK = torch.ones((longest, keys), dtype=torch.bool, device=self.place_N.device).tril(keys - longest)
        own_SK = torch.eye(longest, dtype=torch.bool, device=self.place_N.device)
        own_SK = torch.nn.functional.pad(own_SK, (keys - longest, 0))
        return self.visible_BK[:, None, :] & causal_SK | own_SK


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A layout, and where in it the predictions of a micro-batch are found."""

    layout: Layout
    predict_M: Tensor
    """Place, in [all of GP, then all of BS], of the hidden state from which each loss token is predicted."""
    packed_M: Tensor
    """The same in the packed sequence."""


def arrange(batch: Batch, device: torch.device) -> Arrangement:
    """The rows of a micro-batch with the prefix of each group stored once."""
    tokens = batch.tokens
    prefix_B = shared_prefixes(batch)
    suffix_B = suffix_lengths(batch, prefix_B)
    first_G = np.unique(batch.group_B, return_index=True)[1]
    prefix_G = prefix_B[first_G]
    num_columns = int(prefix_G.max(initial=0))
    longest = int(suffix_B.max(initial=0))
    columns_P, columns_S = np.arange(num_columns), np.arange(longest)
    is_token_GP = columns_P < prefix_G[:, None]
    is_token_BS = columns_S < suffix_B[:, None]
    token_ids_GP = np.where(is_token_GP, tokens.token_ids_BT[first_G, :num_columns], 0)
    positions_BS = prefix_B[:, None] + columns_S
    last = max(tokens.token_ids_BT.shape[1] - 1, 0)
    suffix_ids_BS = np.take_along_axis(tokens.token_ids_BT, np.minimum(positions_BS, last), axis=1)
    is_token = np.concatenate([is_token_GP.ravel(), is_token_BS.ravel()])
    place_N, gather = np.flatnonzero(is_token), np.where(is_token, np.cumsum(is_token) - 1, 0)
    num_padded = is_token_GP.size
    predict_M = _predicting(tokens.loss_mask_BT, prefix_B, batch.group_B, num_padded, num_columns, longest)

    def tensor(array: Int64s | Bools) -> Tensor:
        return torch.tensor(array, device=device)

    layout = Layout(
        token_ids_GP=tensor(token_ids_GP.astype(np.int64)),
        token_ids_BS=tensor(np.where(is_token_BS, suffix_ids_BS, 0).astype(np.int64)),
        positions_BS=tensor(positions_BS),
        prefix_of_B=tensor(batch.group_B),
        visible_BK=tensor(np.concatenate([is_token_GP[batch.group_B], is_token_BS], axis=1)),
        place_N=tensor(place_N),
        gather_GP=tensor(gather[:num_padded].reshape(is_token_GP.shape)),
        gather_BS=tensor(gather[num_padded:].reshape(is_token_BS.shape)),
        num_padded=num_padded,
    )
    return Arrangement(layout, tensor(predict_M), tensor(gather[predict_M]))


def _predicting(
    loss_mask_BT: Bools, prefix_B: Int64s, group_B: Int64s, num_padded: int, num_columns: int, longest: int
) -> Int64s:
    """(M,) place of the token before each loss token; the last token of a prefix predicts the first of every suffix."""
    row_M, position_M = np.nonzero(loss_mask_BT)
    before_M = position_M - 1
    in_prefix_M = before_M < prefix_B[row_M]
    place_in_prefix_M = group_B[row_M] * num_columns + before_M
    place_in_suffix_M = num_padded + row_M * longest + before_M - prefix_B[row_M]
    return np.where(in_prefix_M, place_in_prefix_M, place_in_suffix_M)


def tree_hidden(transformer: Any, arrangement: Arrangement) -> Tensor:
    """(M, H) hidden states that predict the loss tokens, by the way `tree`.

    The model's attention implementation must be `TREE_ATTENTION`, until after the backward pass.
    """
    layout = arrangement.layout
    hidden_1NH = transformer.base_model(
        input_ids=layout.packed_ids_N[None],
        position_ids=layout.packed_positions_N[None],
        use_cache=False,
        tree_layout=layout,
        tree_mask_B1SK=layout.mask_BSK[:, None],
    ).last_hidden_state
    return torch.index_select(hidden_1NH[0], 0, arrangement.packed_M)


def cache_hidden(transformer: Any, arrangement: Arrangement) -> Tensor:
    """(M, H) hidden states that predict the loss tokens, by the way `cache`."""
    layout = arrangement.layout
    if not layout.num_padded:
        hidden_BSH = transformer.base_model(input_ids=layout.token_ids_BS, use_cache=False).last_hidden_state
        return torch.index_select(hidden_BSH.flatten(0, 1), 0, arrangement.predict_M)
    prefixes = transformer.base_model(input_ids=layout.token_ids_GP, use_cache=True)
    if not layout.token_ids_BS.numel():  # rows that hold nothing but their prefix
        return torch.index_select(prefixes.last_hidden_state.flatten(0, 1), 0, arrangement.predict_M)
    cache = prefixes.past_key_values
    if any(cache.is_sliding):
        raise ValueError("a sliding window, whose cache drops what stands before it")
    for layer in cache.layers:
        layer.keys = torch.index_select(layer.keys, 0, layout.prefix_of_B)
        layer.values = torch.index_select(layer.values, 0, layout.prefix_of_B)
    hidden_BSH = transformer.base_model(
        input_ids=layout.token_ids_BS,
        position_ids=layout.positions_BS,
        attention_mask=layout.visible_BK,
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    hidden = torch.cat([prefixes.last_hidden_state.flatten(0, 1), hidden_BSH.flatten(0, 1)])
    return torch.index_select(hidden, 0, arrangement.predict_M)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_layout: Layout,
    tree_mask_B1SK: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed sequence of prefixes and suffixes; transformers calls it once a layer.

    `query` is (1, heads, N, size), `key` and `value` have the heads of the keys; the result is (1, N, heads, size).
    ValueError for a sliding window and for capped scores, which it does not compute.
    """
    if sliding_window is not None or softcap is not None:
        raise ValueError(f"its attention has sliding_window={sliding_window} and softcap={softcap}")
    attend = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=key.shape[1] != query.shape[1])
    query_BS, key_BS, value_BS = (_places(tensor, tree_layout.gather_BS) for tensor in (query, key, value))
    outputs = []
    if tree_layout.num_padded:
        query_GP, key_GP, value_GP = (_places(tensor, tree_layout.gather_GP) for tensor in (query, key, value))
        # Padding stands to the right of its prefix, where a causal mask hides it.
        outputs.append(attend(query_GP, key_GP, value_GP, is_causal=True))
        prefix_of_B = tree_layout.prefix_of_B
        key_BS = torch.cat([torch.index_select(key_GP, 0, prefix_of_B), key_BS], dim=2)
        value_BS = torch.cat([torch.index_select(value_GP, 0, prefix_of_B), value_BS], dim=2)
    outputs.append(attend(query_BS, key_BS, value_BS, attn_mask=tree_mask_B1SK))
    flat = torch.cat([output.transpose(1, 2).flatten(0, 1) for output in outputs])
    return torch.index_select(flat, 0, tree_layout.place_N)[None], None


def _places(packed: Tensor, gather: Tensor) -> Tensor:
    """(rows, heads, columns, size) of the packed (1, heads, N, size)."""
    _, heads, _, size = packed.shape
    chosen = torch.index_select(packed[0], 1, gather.flatten())
    return chosen.view(heads, *gather.shape, size).transpose(0, 1)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The packed sequence has no mask of [N, N]."""


@lru_cache(maxsize=1)
def register_tree_attention() -> None:
    """Make `TREE_ATTENTION` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
