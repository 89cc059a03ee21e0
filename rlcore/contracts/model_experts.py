"""Reads from config.json which layers of a decoder are mixtures of experts, and how large their experts are."""

from typing import Any

from rlcore.contracts.requests import Experts

KNOWN = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "dots1", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama4_text"),
        *("mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"),
    }
)
"""Values of `model_type` whose experts are gated feed-forwards, in the layers that `_expert_layers` counts."""
NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names in config.json for the number of experts of a layer."""
LLAMA4 = "llama4_text"
"""A family that computes every expert for each token, and scales the inputs of the chosen ones."""
MAX, MAX_LAYERS = 1 << 24, 10_000
"""The largest plausible number of experts or size of an expert, and number of layers."""
DENSE_FIRST = {"deepseek_v3": 3, "glm4_moe": 1, "glm4_moe_lite": 1}
"""Number of first layers without experts if config.json does not say, by `model_type`; 0 for any other."""


def experts_of(config: dict[str, Any]) -> Experts | None:
    """The experts of a decoder; None for a dense model, and for one whose experts are unknown."""
    try:
        return _experts(config) if _kind(config) in KNOWN else None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        return None


def _experts(config: dict[str, Any]) -> Experts | None:
    number = next((int(config[name]) for name in NUMBERS if config.get(name)), 0)
    per_token, layers = int(config.get("num_experts_per_tok") or 0), _expert_layers(config)
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = _shared_size(config, size)
    if not (0 < per_token <= number <= MAX and 0 < size <= MAX and 0 <= shared <= MAX and layers):
        return None
    return Experts(number, per_token, size, layers, shared, number if _kind(config) == LLAMA4 else 0)


def _kind(config: dict[str, Any]) -> str:
    return str(config.get("model_type"))


def dense_size(config: dict[str, Any]) -> int | None:
    """Inner size of the feed-forward layers without experts; None if config.json does not say."""
    size = config.get("intermediate_size_mlp") if _kind(config) == LLAMA4 else None
    return size or config.get("intermediate_size")


def _shared_size(config: dict[str, Any], size: int) -> int:
    """Inner size of the experts of a layer that every token goes through."""
    if _kind(config) == LLAMA4:
        return size
    return int(config.get("shared_expert_intermediate_size") or size * int(config.get("n_shared_experts") or 0))


def _expert_layers(config: dict[str, Any]) -> int:
    """The number of layers with experts, by the rule of the model's family."""
    if (number := int(config["num_hidden_layers"])) > MAX_LAYERS:
        raise ValueError(f"{number} is not a number of layers")
    layers = range(number)
    if _kind(config) == LLAMA4:
        step = int(config.get("interleave_moe_layer_step") or 1)
        named = config.get("moe_layers")
        return len(set(layers[step - 1 :: step] if named is None else named) & set(layers))
    if kinds := config.get("mlp_layer_types"):
        return sum(kind == "sparse" for kind in kinds[: len(layers)])
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    named = config.get("first_k_dense_replace")
    first = DENSE_FIRST.get(_kind(config), 0) if named is None else int(named)
    return sum(layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in layers)
