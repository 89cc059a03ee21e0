"""Reads from config.json the sizes of an attention that computes keys and values from latents."""

from typing import Any

from rlcore.contracts.requests import Latents

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Names in config.json for the latent of keys and values, the two parts of a key (the second has a position), and a
value."""
MAX = 1 << 24
"""The largest plausible size."""


def latents_of(config: dict[str, Any]) -> Latents | None:
    """The latents of a decoder's attention; None if keys and values are computed from hidden states.

    ValueError or another error of `rlcore.contracts.model_files.ODD` for sizes that are missing or odd.
    """
    if not config.get("kv_lora_rank"):
        return None
    rank, apart, rotated, value = (int(config[name]) for name in SIZES)
    query_rank = int(config.get("q_lora_rank") or 0)
    if not (0 <= query_rank <= MAX and all(0 < size <= MAX for size in (rank, apart, rotated, value))):
        raise ValueError(f"{query_rank}, {rank}, {apart}, {rotated} and {value} are not sizes of an attention")
    return Latents(query_rank, rank, rotated, apart + rotated, value)


def attention_parameters(latents: Latents, hidden: int, heads: int) -> int:
    """Numbers of the attention matrices of a layer."""
    queries = heads * latents.head_size
    query = latents.query_rank * (hidden + queries) if latents.query_rank else hidden * queries
    expanded = heads * (latents.head_size - latents.rotated + latents.value_size)
    return query + hidden * latents.cached_size + latents.key_rank * expanded + heads * latents.value_size * hidden
