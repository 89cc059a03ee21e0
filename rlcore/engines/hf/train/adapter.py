"""Additions to a transformers model before it is trained: a LoRA adapter, gradient checkpointing."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rlcore.config import LoraConfig, ModelConfig
from rlcore.engines.hf.train.trial_noise import has_routers
from rlcore.errors import ConfigError, boundary, nearest

EXPERT_NAMES = frozenset({"gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3"})
"""Names that peft takes for routers and weights of experts, also in dense layers and shared experts of such models."""


def checkpoint_gradients(transformer: Any) -> None:
    """Keep only the inputs of each layer for the backward pass."""
    settings = {"use_reentrant": False}
    if hasattr(transformer, "activation_checkpointing_enable"):
        transformer.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:  # its name in earlier releases of transformers 5
        transformer.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def add_adapter(transformer: Any, lora: LoraConfig, model: ModelConfig, section: str, *, causal: bool) -> Any:
    """The peft model around `transformer`, whose linear layers now carry trainable adapters; the rest is frozen.

    ConfigError for an output layer, and for experts, whose weights are not linear layers.
    """
    try:
        import peft
    except ImportError as missing:
        raise ConfigError(
            f"{section}.lora.enabled=true: the package peft is not installed; pip install peft"
        ) from missing
    outputs = [name for name, module in transformer.named_modules() if module is transformer.get_output_embeddings()]
    if any(f".{name}".endswith(f".{target}") for name in outputs for target in lora.target_modules):
        raise ConfigError(
            f"{section}.lora.target_modules={list(lora.target_modules)}: the output layer '{outputs[0]}' cannot carry "
            "an adapter; leave it out"
        )
    alpha: Any = lora.alpha  # peft's annotation says int; it divides, and takes any number
    targets = _targets(transformer, lora, section)
    _check_targets(transformer, lora.target_modules, section)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM" if causal else "FEATURE_EXTRACTION",
    )
    # A warning that users cannot act on: peft uses an old name of transformers.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    with boundary(f"{section}.lora.target_modules={list(lora.target_modules)}", ConfigError):
        adapted = peft.get_peft_model(transformer, config, autocast_adapter_dtype=False)
    _name_base(config, model)
    return adapted


def _name_base(config: Any, model: ModelConfig) -> None:
    """The saved adapter finds its base from any working directory, and at the revision that was trained."""
    local = Path(model.path).is_dir()
    # Not among the arguments of peft's configuration: `get_peft_model` replaces it with the transformer's name.
    config.base_model_name_or_path = str(Path(model.path).resolve()) if local else model.path
    config.revision = None if local else model.revision


def _check_targets(transformer: Any, targets: Sequence[str], section: str) -> None:
    """ConfigError for a target that no module has: peft skips it if another one matches."""
    modules = dict(transformer.named_modules())
    for target in targets:
        if target != "all-linear" and not any(f".{name}".endswith(f".{target}") for name in modules):
            known = sorted({name.rpartition(".")[2] for name, layer in modules.items() if isinstance(layer, nn.Linear)})
            found = f"{section}.lora.target_modules={list(targets)}: {type(transformer).__name__}"
            raise ConfigError(f"{found} has no module '{target}'; {nearest(target, known)}")


def _targets(transformer: Any, lora: LoraConfig, section: str) -> Any:
    """The modules that carry an adapter, in peft's terms. `all-linear` leaves out routers and shared experts, too:
    linear layers in some models only, whose names peft takes for those of experts."""
    targets = list(lora.target_modules)
    if not has_routers(transformer):
        return targets[0] if targets == ["all-linear"] else targets
    in_attention = {
        name.rpartition(".")[2]
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and ("attn" in name or "attention" in name)
    }
    possible = sorted(in_attention - EXPERT_NAMES)
    if targets == ["all-linear"]:
        return possible
    experts = [target for target in targets if target.rpartition(".")[2] in EXPERT_NAMES]
    if experts:
        raise ConfigError(
            f"{section}.lora.target_modules={targets}: {type(transformer).__name__} has experts, and "
            f"'{experts[0]}' would be among their weights, which cannot carry an adapter; choose from: "
            f"{', '.join(possible)}"
        )
    return targets
