"""Attention of rows that share prompts, for every transformers model whose attention can be chosen.

The queries of all rows of a prompt are multiplied with its keys at once, so that a prompt is read once for its rows
and not once for each; both parts are then put together by their log-sums, as in arXiv:2402.05099.

Letters as in `kv_cache`; M queries that share a key-value head: T times the heads of the group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlcore.backends.hf.kv_cache import RowPass, SlotCache

NAME = "rlcore_rows"

_CACHE: ContextVar[SlotCache] = ContextVar("rlcore_rows_cache")


class UnsupportedAttention(Exception):
    """The model asks for something that `attend` does not compute."""


@contextmanager
def attending(config: Any, cache: SlotCache) -> Iterator[None]:
    """The model of `config` attends with `attend` inside; to be held for one forward pass."""
    before = config._attn_implementation
    token = _CACHE.set(cache)
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _CACHE.reset(token)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(R, T, heads, D) attention of (R, heads, T, D) queries over the current pass of the cache.

    `key`, `value` and the mask are not read: the cache has written them. `s_aux` are the logits of attention sinks,
    one a head.
    """
    cache = _CACHE.get()
    current, layer = cache.row_pass, cache.current
    if layer is None or position_bias is not None:
        raise UnsupportedAttention("a position bias, or an attention that does not write to the cache")
    num_rows, heads, tokens, size = query.shape
    keys_RhLD = layer.row_part(0)
    kv_heads = keys_RhLD.shape[1]
    query_RhMD = (query * (size**-0.5 if scaling is None else scaling)).reshape(num_rows, kv_heads, -1, size)
    prompt_mask, own_mask = current.masks(sliding_window)

    query_GhWD = _by_prompt(query_RhMD, current)
    scores_GhWP = _scores(query_GhWD, layer.prompt_part(0), softcap)
    if sliding_window is None and tokens == 1:  # all rows of a prompt see the same
        scores_GhWP += prompt_mask[current.rows_GW[:, 0], :, None]
    else:
        mask_RMP = prompt_mask[:, None].expand(-1, kv_heads, -1, -1)
        mask_RhMP = mask_RMP.repeat(1, 1, heads // kv_heads, 1)
        scores_GhWP += _by_prompt(mask_RhMP, current)
    shared = _part(scores_GhWP, layer.prompt_part(1))
    shared = _by_row(shared, current)

    scores_RhML = _scores(query_RhMD, keys_RhLD, softcap)
    scores_RhML.view(num_rows, kv_heads, -1, tokens, scores_RhML.shape[-1]).add_(own_mask[:, None, None])
    own = _part(scores_RhML, layer.row_part(1))
    sinks = None if s_aux is None else s_aux.view(1, kv_heads, -1, 1).repeat_interleave(tokens, dim=2)
    out_RhMD = _together(shared, own, sinks).to(query.dtype)
    return out_RhMD.reshape(num_rows, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _scores(query: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
    scores = query @ keys.transpose(2, 3)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return scores if softcap is None else torch.tanh(scores.div_(softcap)).mul_(softcap)


def _part(scores: Tensor, values: Tensor) -> Tensor:
    """(..., D + 2) attention over one part of the positions, not yet divided; its sum, and its highest score."""
    highest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return torch.cat([(weights.to(values.dtype) @ values).to(weights.dtype), total, highest], dim=-1)


def _together(one: Tensor, other: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention over both parts, and over sinks, which add to the sum and to nothing else."""
    highest = torch.maximum(one[..., -1:], other[..., -1:])
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    joined = one[..., :-1] * (one[..., -1:] - highest).exp() + other[..., :-1] * (other[..., -1:] - highest).exp()
    total = joined[..., -1:] if sinks is None else joined[..., -1:] + (sinks - highest).exp()
    return joined[..., :-1] / total


def _by_prompt(rows_RhMX: Tensor, current: RowPass) -> Tensor:
    """(G, h, W * M, X): the rows of a prompt next to each other."""
    _, kv_heads, queries, size = rows_RhMX.shape
    num_prompts, width = current.rows_GW.shape
    apart = rows_RhMX.index_select(0, current.places_F).view(num_prompts, width, kv_heads, queries, size)
    return apart.transpose(1, 2).reshape(num_prompts, kv_heads, width * queries, size)


def _by_row(prompts_GhWX: Tensor, current: RowPass) -> Tensor:
    """(R, h, M, X) again."""
    num_prompts, width = current.rows_GW.shape
    _, kv_heads, lines, size = prompts_GhWX.shape
    apart = prompts_GhWX.view(num_prompts, kv_heads, width, lines // width, size).transpose(1, 2)
    return apart.reshape(num_prompts * width, kv_heads, lines // width, size).index_select(0, current.place_R)


AttentionInterface.register(NAME, attend)
