"""Decodes one token of every row through the layers of the Llama family, in few operations.

One token of a few dozen rows is so little work that the number of operations dominates. Here a norm takes four, queries
and keys are rotated together, and matrix products add the residuals. The results are compared with the model's own
forward pass before it is used; other models use their own modules.

Letters as in `kv_cache`; H hidden size, A query heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from rlcore.engines.hf.sample.kv_cache import RowPass, SlotCache, SlotLayer
from rlcore.engines.hf.sample.packed_linear import PackedLinears
from rlcore.engines.hf.sample.row_attention import attend_apart, attend_together, can_attend_together
from rlcore.engines.hf.train.half_products import multiplies_half

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Architectures with layers of norm, attention with rotated queries and keys, norm, gated SiLU."""

Product = Callable[[Tensor, Tensor | None], Tensor]
"""A product of states with weights, plus an optional summand."""


def is_known(transformer: Any) -> bool:
    """True if `FusedDecode` supports a model's layers: known by name, and unmodified."""
    base, config = transformer.base_model, transformer.config
    family = type(base).__name__.removesuffix("Model")
    if family not in FAMILIES or not type(base).__module__.startswith("transformers.models."):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) or config.hidden_act != "silu":
        return False
    return all(_is_plain(layer, family) for layer in base.layers)


def is_watched(transformer: Any) -> bool:
    """True if a module has forward hooks or a replaced `forward`, which fused decoding would bypass."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for module in transformer.modules()
    )


def _is_plain(layer: Any, family: str) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    kinds = [type(module).__name__ for module in (layer, attention, mlp, layer.input_layernorm)]
    return (
        kinds == [f"{family}{name}" for name in ("DecoderLayer", "Attention", "MLP", "RMSNorm")]
        and all(type(linear) is nn.Linear and type(linear.weight) is nn.Parameter for linear in linears)
        and (can_attend_together(linears[0].weight) or multiplies_half(linears[0].weight))
    )


class FusedDecode:
    """A model's layers, prepared for one token per row; valid until the weights change."""

    def __init__(self, transformer: Any, packed: PackedLinears | None) -> None:
        self._base = transformer.base_model
        self._layers = [_Layer(layer, packed) for layer in self._base.layers]

    def hidden(self, current: RowPass, cache: SlotCache, token_ids_R1: Tensor) -> Tensor:
        """(R, H) last hidden states of a pass of one token per row, whose keys and values are written to the cache."""
        cache.now = current
        states_RH = self._base.embed_tokens(token_ids_R1)[:, 0]
        cos_R1D, sin_R1D = self._base.rotary_emb(states_RH[:, None], position_ids=current.positions_RT)
        half = sin_R1D.shape[-1] // 2
        turn_R1D = torch.cat([-sin_R1D[..., :half], sin_R1D[..., half:]], dim=-1)
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            if not isinstance(kept, SlotLayer):
                raise TypeError(f"rollout: a cache of rows holds a {type(kept).__name__}; needs a SlotLayer")
            query_RAD, key_RhD, value_RhD = layer.heads(states_RH, cos_R1D, turn_R1D)
            kept.update(key_RhD[:, :, None], value_RhD[:, :, None])
            query_RhMD = query_RAD.reshape(len(query_RAD), key_RhD.shape[1], -1, query_RAD.shape[-1])
            attend = attend_together if can_attend_together(query_RhMD) else attend_apart
            attended_RhMD = attend(query_RhMD, kept, current, layer.scale)
            states_RH = layer.rest(attended_RhMD.reshape(len(attended_RhMD), -1), states_RH)
        return _normed(self._base.norm, states_RH)


class _Layer:
    """One layer."""

    def __init__(self, layer: Any, packed: PackedLinears | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.scale: float = attention.scaling
        self._size: int = attention.head_dim
        self._num_queries = attention.q_proj.out_features // self._size
        self._num_turned = self._num_queries + attention.k_proj.out_features // self._size
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._norms_of_heads = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._heads = _product((attention.q_proj, attention.k_proj, attention.v_proj), packed)
        self._out = _product((attention.o_proj,), packed)
        self._gate_and_up = _product((mlp.gate_proj, mlp.up_proj), packed)
        self._down = _product((mlp.down_proj,), packed)

    def heads(self, states_RH: Tensor, cos_R1D: Tensor, turn_R1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(R, A, D) queries, (R, h, D) keys, both rotated, and (R, h, D) values."""
        product = self._heads(_normed(self._norms[0], states_RH), None)
        every_RAD = product.view(len(product), -1, self._size)
        both_RAD = every_RAD[:, : self._num_turned]
        query_norm, key_norm = self._norms_of_heads
        if query_norm is not None and key_norm is not None:
            queries, keys = both_RAD[:, : self._num_queries], both_RAD[:, self._num_queries :]
            both_RAD = torch.cat([_normed(query_norm, queries), _normed(key_norm, keys)], dim=1)
        # The two halves of a head are rotated into each other.
        turned_RAD = torch.addcmul(both_RAD * cos_R1D, both_RAD.roll(self._size // 2, -1), turn_R1D)
        keys = turned_RAD[:, self._num_queries :]
        return turned_RAD[:, : self._num_queries], keys, every_RAD[:, self._num_turned :]

    def rest(self, attended_RX: Tensor, states_RH: Tensor) -> Tensor:
        """(R, H) output of the layer, from its attention output and its input."""
        states_RH = self._out(attended_RX, states_RH)
        both = self._gate_and_up(_normed(self._norms[1], states_RH), None)
        gate, up = both.chunk(2, dim=-1)
        return self._down(silu(gate).mul_(up), states_RH)


def _normed(norm: Any, states: Tensor) -> Tensor:
    """The norm's output, in few operations if it computes in the precision of the states."""
    if states.dtype != torch.float32:
        normed: Tensor = norm(states)
        return normed
    size = states.shape[-1]
    length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    root = torch.hypot(length.mul_(size**-0.5), length.new_full((), norm.variance_epsilon**0.5))
    weighted: Tensor = states * norm.weight
    return weighted.div_(root)


def _product(layers: Sequence[nn.Linear], packed: PackedLinears | None) -> Product:
    """The products of layers with the same input, concatenated."""
    found = packed.product_of(layers) if packed is not None else None
    if found is not None:
        return found
    if len(layers) > 1:
        parts = [_product((layer,), packed) for layer in layers]
        return lambda states, added: torch.cat([part(states, None) for part in parts], dim=-1)
    layer = layers[0]

    def multiply(states: Tensor, added: Tensor | None) -> Tensor:
        product = linear(states, layer.weight, layer.bias)
        return product if added is None else product.add_(added)

    return multiply
