"""Shared prefixes with `cache`: computes prefixes first; their keys and values, with their graph, are the suffixes'
cache.

Letters: B rows, T positions, S positions of a row after its prefix, P positions of a prefix, G prefixes, M loss tokens,
K keys that a suffix may see (P + S), H hidden size.

Both passes are padded. A row's last loss token and everything after it are left out, because they predict nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.data.batch import shared_prefixes, suffix_lengths
from rlcore.engines.hf.cache_name import cache_name
from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.types import Batch, Bools, Int64s


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Places of the tokens of a micro-batch's prefixes and suffixes."""

    token_ids_GP: Tensor
    token_ids_BS: Tensor
    positions_BS: Tensor
    """Position of each token of a suffix in its row; padding continues the count."""
    prefix_of_B: Tensor
    """The prefix that a row begins with."""
    visible_BK: Tensor
    """True where the key (prefix first, then suffix) is a token, not padding."""
    predict_M: Tensor
    """Place, in [all of GP, then all of BS], of the hidden state from which each loss token is predicted."""


def pad(batch: Batch, device: torch.device) -> PaddedBatch:
    """The rows of a micro-batch with the prefix of each group stored once."""
    tokens = batch.tokens
    prefix_B = shared_prefixes(batch)
    suffix_B = suffix_lengths(batch, prefix_B)
    first_G = np.unique(batch.group_B, return_index=True)[1]
    prefix_G = prefix_B[first_G]
    num_columns = int(prefix_G.max(initial=0))
    longest = int(suffix_B.max(initial=0 if num_columns else 1))  # transformers computes no empty sequence
    columns_P, columns_S = np.arange(num_columns), np.arange(longest)
    is_token_GP = columns_P < prefix_G[:, None]
    is_token_BS = columns_S < suffix_B[:, None]
    token_ids_GP = np.where(is_token_GP, tokens.token_ids_BT[first_G, :num_columns], 0)
    positions_BS = prefix_B[:, None] + columns_S
    last = max(tokens.token_ids_BT.shape[1] - 1, 0)
    suffix_ids_BS = np.take_along_axis(tokens.token_ids_BT, np.minimum(positions_BS, last), axis=1)
    predict_M = _predicting(tokens.loss_mask_BT, prefix_B, batch.group_B, is_token_GP.size, num_columns, longest)

    def tensor(array: Int64s | Bools) -> Tensor:
        return device_tensor(array, device)

    return PaddedBatch(
        token_ids_GP=tensor(token_ids_GP.astype(np.int64)),
        token_ids_BS=tensor(np.where(is_token_BS, suffix_ids_BS, 0).astype(np.int64)),
        positions_BS=tensor(positions_BS),
        prefix_of_B=tensor(batch.group_B),
        visible_BK=tensor(np.concatenate([is_token_GP[batch.group_B], is_token_BS], axis=1)),
        predict_M=tensor(predict_M),
    )


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


def cache_hidden(transformer: Any, padded: PaddedBatch) -> Tensor:
    """(M, H) hidden states that predict the loss tokens."""
    if not padded.token_ids_GP.numel():
        hidden_BSH = transformer.base_model(input_ids=padded.token_ids_BS, use_cache=False).last_hidden_state
        return torch.index_select(hidden_BSH.flatten(0, 1), 0, padded.predict_M)
    prefixes = transformer.base_model(input_ids=padded.token_ids_GP, use_cache=True)
    if not padded.token_ids_BS.numel():  # rows without a suffix
        return torch.index_select(prefixes.last_hidden_state.flatten(0, 1), 0, padded.predict_M)
    name = cache_name(transformer.base_model)
    cache = getattr(prefixes, name)
    if any(cache.is_sliding):
        raise ValueError("a sliding window, whose cache drops what stands before it")
    for layer in cache.layers:
        layer.keys = torch.index_select(layer.keys, 0, padded.prefix_of_B)
        layer.values = torch.index_select(layer.values, 0, padded.prefix_of_B)
    hidden_BSH = transformer.base_model(
        input_ids=padded.token_ids_BS,
        position_ids=padded.positions_BS,
        attention_mask=padded.visible_BK,
        use_cache=True,
        **{name: cache},
    ).last_hidden_state
    hidden = torch.cat([prefixes.last_hidden_state.flatten(0, 1), hidden_BSH.flatten(0, 1)])
    return torch.index_select(hidden, 0, padded.predict_M)
