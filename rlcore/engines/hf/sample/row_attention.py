"""Attention for rows that share prompts, for every transformers model with selectable attention.

The queries of all rows of a prompt are multiplied with its keys at once, so a prompt is read once, not once per row.
Both parts are then combined by their log-sums, as in arXiv:2402.05099.

Letters as in `kv_cache`; M queries that share a key-value head: T times the heads of the group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlcore.engines.hf.sample.kv_cache import RowPass, SlotCache, SlotLayer
from rlcore.engines.hf.train.head import at_least_float32

NAME = "rlcore_rows"

_CACHE: ContextVar[SlotCache] = ContextVar("rlcore_rows_cache")


class UnsupportedAttention(Exception):
    """The model needs something that `attend` does not support."""


@contextmanager
def attending(config: Any, cache: SlotCache) -> Iterator[None]:
    """Context, for one forward pass, in which the model of `config` uses `attend`."""
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

    `key`, `value` and the mask are not read, because the cache has them. `s_aux` are the logits of attention sinks, one
    per head. UnsupportedAttention if the cache has something else, such as the latents of DeepSeek's attention.
    """
    cache = _CACHE.get()
    current, layer = cache.row_pass, cache.current
    if layer is None or position_bias is not None:
        raise UnsupportedAttention("a position bias, or an attention that does not write to the cache")
    num_rows, heads, tokens, size = query.shape
    cached = layer.row_part(0)
    kv_heads = cached.shape[1]
    if (kv_heads, cached.shape[3]) != (key.shape[1], key.shape[3]):
        raise UnsupportedAttention("a cache of something else than keys and values")
    query_RhMD = query.reshape(num_rows, kv_heads, -1, size)
    scale = size**-0.5 if scaling is None else scaling
    if tokens == 1 and softcap is None and s_aux is None and can_attend_together(query):
        out_RhMD = attend_together(query_RhMD, layer, current, scale, sliding_window)
        return out_RhMD.reshape(num_rows, 1, heads, -1), None
    out_RhMD = attend_apart(query_RhMD, layer, current, scale, sliding_window, softcap, s_aux)
    out_RhTD = out_RhMD.reshape(num_rows, heads, tokens, -1)
    return out_RhTD.transpose(1, 2).contiguous(), None


def attend_apart(
    query_RhMD: Tensor,
    layer: SlotLayer,
    current: RowPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """(R, h, M, D) attention over the prompts and over each row's own tokens, joined by log-sums."""
    kv_heads, tokens = query_RhMD.shape[1], current.tokens
    mask_G1XP, mask_R1ML = _masks(current, window, query_RhMD.shape[2] // tokens, query_RhMD.dtype)

    query_GhXD = _by_prompt(query_RhMD, current)
    prompt = _part(query_GhXD, layer.prompt_part(0), layer.prompt_part(1), mask_G1XP, scale, softcap)
    out_RhMD, log_sum_RhM1 = (_by_row(message, current) for message in prompt)
    own = _part(query_RhMD, layer.row_part(0), layer.row_part(1), mask_R1ML, scale, softcap)
    out_RhMD = torch.lerp(own[0], out_RhMD, torch.sigmoid(log_sum_RhM1 - own[1]))
    if s_aux is not None:
        sinks_1hM1 = s_aux.view(1, kv_heads, -1, 1).repeat_interleave(tokens, dim=2)
        out_RhMD = out_RhMD * torch.sigmoid(torch.logaddexp(log_sum_RhM1, own[1]) - sinks_1hM1)
    return out_RhMD.to(query_RhMD.dtype)


def can_attend_together(tensor: Tensor) -> bool:
    """True if `attend_together` is faster, and as exact, for tensors like this one."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def attend_together(
    query_RhMD: Tensor, layer: SlotLayer, current: RowPass, scale: float, window: int | None = None
) -> Tensor:
    """(R, h, M, D) attention of one token per row, with one softmax over its prompt and its own part.

    For so few queries, operations for whole sequences take several times as long as these products.
    """
    num_rows, kv_heads, queries, _ = query_RhMD.shape
    positions, split = current.longest_prompt + current.longest_own, current.longest_prompt
    scores_RhMX = query_RhMD.new_empty((num_rows, kv_heads, queries, positions))
    at_prompt, at_own = scores_RhMX[..., :split], scores_RhMX[..., split:]
    keys_GhPD, values_GhPD = layer.prompt_part(0), layer.prompt_part(1)
    keys_RhLD, values_RhLD = layer.row_part(0), layer.row_part(1)
    with_prompt = _products(_by_prompt(query_RhMD, current), keys_GhPD.transpose(2, 3))
    if current.in_order:
        torch.mul(_apart_by_prompt(with_prompt, current), scale, out=_apart(at_prompt, current))
    else:
        torch.mul(_by_row(with_prompt, current), scale, out=at_prompt)
    torch.mul(_products(query_RhMD, keys_RhLD.transpose(2, 3)), scale, out=at_own)
    mask_R11X = _whole_mask(current, window, query_RhMD.dtype)
    if mask_R11X is not None:
        scores_RhMX += mask_R11X
    torch.softmax(scores_RhMX, dim=-1, out=scores_RhMX)
    out_RhMD = _products(at_own, values_RhLD)
    from_prompt = _products(_by_prompt(at_prompt, current), values_GhPD)
    if current.in_order:
        _apart(out_RhMD, current).add_(_apart_by_prompt(from_prompt, current))
        return out_RhMD
    return out_RhMD.add_(_by_row(from_prompt, current))


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Matrix products over the last two of four dimensions, without the copies that `matmul` makes of views."""
    product = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return product.view(*left.shape[:-1], right.shape[-1])


def _apart(rows_RhMX: Tensor, current: RowPass) -> Tensor:
    """(G, W, h, M, X) view of rows that are ordered by prompt."""
    return rows_RhMX.view(*current.rows_GW.shape, *rows_RhMX.shape[1:])


def _apart_by_prompt(prompts_GhWX: Tensor, current: RowPass) -> Tensor:
    """(G, W, h, M, X) view of a result of `_by_prompt`."""
    num_prompts, kv_heads, _, size = prompts_GhWX.shape
    return prompts_GhWX.view(num_prompts, kv_heads, current.rows_GW.shape[1], -1, size).transpose(1, 2)


def _whole_mask(current: RowPass, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """(R, 1, 1, P + L) mask of a pass of one token per row, the same for every layer; None if nothing is hidden."""
    key = window, dtype
    if key not in current.whole_masks:
        mask_R1X = torch.cat(current.masks(window), dim=-1)
        current.whole_masks[key] = mask_R1X[:, None].to(dtype) if bool(mask_R1X.any()) else None
    return current.whole_masks[key]


def _masks(current: RowPass, window: int | None, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(G, 1, 1 or W * M, P) and (R, 1, M, L) masks for heads that share keys, the same for every layer of a pass."""
    key = window, heads, dtype
    if key not in current.masks_of_heads:
        prompt_RTP, own_RTL = current.masks(window)
        lowest = torch.finfo(dtype).min  # float16 has no -1e30, and what sees nothing of a part must not become NaN
        own_R1ML = own_RTL[:, None].repeat(1, 1, heads, 1).to(dtype).clamp_min_(lowest)
        if window is None:  # every token of every row of a prompt sees the whole prompt
            prompt_G1XP = prompt_RTP[current.rows_GW[:, 0], None, :1]
        else:
            prompt_G1XP = _by_prompt(prompt_RTP[:, None].repeat(1, 1, heads, 1), current)
        current.masks_of_heads[key] = prompt_G1XP.to(dtype).clamp_min(lowest), own_R1ML
    return current.masks_of_heads[key]


def _part(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over one part of the positions, and (..., 1) its log-sum; in float32 for half precision."""
    if can_fuse(query.device) and softcap is None and values.shape[-1] == query.shape[-1]:
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=scale
        )
        return at_least_float32(out), log_sum[..., None]
    scores = at_least_float32((query * scale) @ keys.transpose(2, 3))
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
    scores += mask
    highest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return at_least_float32(weights.to(values.dtype) @ values) / total, highest + total.log()


def can_fuse(device: torch.device) -> bool:
    """True if this build of torch has one operation for attention with log-sums on that device."""
    return device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


def _by_prompt(rows_RhMX: Tensor, current: RowPass) -> Tensor:
    """(G, h, W * M, X): the rows of a prompt next to each other."""
    _, kv_heads, queries, size = rows_RhMX.shape
    num_prompts, width = current.rows_GW.shape
    chosen = rows_RhMX if current.in_order else rows_RhMX.index_select(0, current.places_F)
    apart = chosen.reshape(num_prompts, width, kv_heads, queries, size)
    return apart.transpose(1, 2).reshape(num_prompts, kv_heads, width * queries, size)


def _by_row(prompts_GhWX: Tensor, current: RowPass) -> Tensor:
    """(R, h, M, X): the inverse of `_by_prompt`."""
    num_prompts, width = current.rows_GW.shape
    _, kv_heads, lines, size = prompts_GhWX.shape
    apart = prompts_GhWX.view(num_prompts, kv_heads, width, lines // width, size).transpose(1, 2)
    rows = apart.reshape(num_prompts * width, kv_heads, lines // width, size)
    return rows if current.in_order else rows.index_select(0, current.place_R)


AttentionInterface.register(NAME, attend)
