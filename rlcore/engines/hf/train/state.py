"""Weights and training state on disk: tensors as safetensors, everything else as JSON, nothing pickled."""

import json
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.contracts.stored_formats import check_stored
from rlcore.engines.hf.load_saved import ADAPTER_DIR, MODEL_DIR, check_kind
from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.model import ValueModel, load_value_head, value_head_file
from rlcore.engines.hf.train.sharded_load import from_rows
from rlcore.engines.hf.train.sharded_tensors import HOST, put
from rlcore.engines.hf.train.state_files import OF_TORCH, StateFile, check_restored, settings_files, write_files
from rlcore.engines.hf.train.tensor_names import check_tensors
from rlcore.errors import CheckpointError, ConfigError, boundary

INDEX = "model.safetensors.index.json"
MAX_FILE_SIZE = "50GB"
"""Maximum size of a file of a model's tensors, as in transformers."""
BASE_LAYER = ".base_layer."
"""Part of the names of weights that an adapter is added to."""


Weights = Mapping[str, Tensor]
"""Tensors by their names in the transformer."""


def weight_files(model: Model, weights: Weights | None = None, *, in_units: bool = False) -> Iterator[StateFile]:
    """Makes `model/`, which from_pretrained opens, or with LoRA `adapter/`, which names its base.

    `weights`: the gathered weights of an adapter. `in_units`: the transformer's files are made elsewhere.
    """
    if model.adapter is not None:
        yield from (file.below(ADAPTER_DIR) for file in _adapter_files(model, weights))
    elif model.owns_transformer and not in_units:
        yield from (file.below(MODEL_DIR) for file in _transformer_files(model))
    if isinstance(model, ValueModel):
        yield value_head_file(model).below(MODEL_DIR)


def save_adapter(model: Model, directory: Path, weights: Weights | None = None) -> None:
    """Write peft's directory of a LoRA model's adapter; `weights` as in `weight_files`."""
    with boundary(f"the adapter in '{directory}'", CheckpointError):
        write_files(_adapter_files(model, weights), directory)


def _adapter_files(model: Model, weights: Weights | None) -> Iterator[StateFile]:
    from peft import get_peft_model_state_dict

    def settings(directory: str) -> None:
        model.adapter.save_pretrained(directory, state_dict={}, save_embedding_layers=False)
        # peft writes the targets in the order of a set, which differs from process to process.
        path = Path(directory) / "adapter_config.json"
        saved = json.loads(path.read_text("utf-8"))
        if isinstance(saved["target_modules"], list):
            path.write_text(json.dumps(saved | {"target_modules": sorted(saved["target_modules"])}, indent=2), "utf-8")

    yield from settings_files(settings)
    tensors = tensors_of(model.adapter) | dict(weights or {})
    found: dict[str, Tensor] = get_peft_model_state_dict(model.adapter, state_dict=tensors, save_embedding_layers=False)
    yield StateFile("adapter_model.safetensors", found, OF_TORCH, tuple(found))


def _transformer_files(model: Model) -> Iterator[StateFile]:
    """The files of save_pretrained."""
    from huggingface_hub import split_torch_state_dict_into_shards

    yield from transformer_settings(model)
    tensors = stored_tensors(model, merged_weights(model))
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_FILE_SIZE
    )
    for file, names in split.filename_to_tensors.items():
        yield StateFile(file, {name: tensors[name] for name in names}, OF_TORCH, set(names) - buffers_of(model).keys())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        yield StateFile(INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def transformer_settings(model: Model) -> Iterator[StateFile]:
    """The files of a model directory that hold no tensors."""
    return settings_files(lambda directory: model.transformer.save_pretrained(directory, state_dict={}))


def save_whole(model: Model, directory: Path) -> None:
    """Write a model directory for from_pretrained; for a LoRA model, the base with the adapter merged.

    The model's tensors stay unchanged: merging in place and undoing it would not restore their low bits.
    """
    with boundary(f"weights in '{directory}'", CheckpointError):
        write_files(_transformer_files(model), directory)


def stored_tensors(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that `from_pretrained` expects in files."""
    for name in getattr(model.transformer, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(name, None)
    return whole_tensors(model, tensors)


@torch.no_grad()
def whole_tensors(model: Model, weights: Weights | None = None) -> dict[str, Tensor]:
    """The tensors that `save_whole` would write, by their names in its files.

    `weights`: only these of `merged_weights`.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    tensors = merged_weights(model) if weights is None else dict(weights)
    return dict(
        revert_weight_conversion(model.transformer, remove_tied_weights_from_state_dict(tensors, model.transformer))
    )


@torch.no_grad()
def merged_weights(model: Model, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The transformer's tensors; for a LoRA model merged, under the base model's names.

    `names`: only the results for parameters of these names. A merged weight moves to host memory before the next one is
    made, so the device never holds a second model.
    """
    tensors = tensors_of(model.transformer)
    if names is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if f"transformer.{name}" in names}
    if model.adapter is None:
        return tensors
    from peft.tuners.lora import LoraLayer

    merged = {name.replace(BASE_LAYER, "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for name, module in model.transformer.named_modules():
        if isinstance(module, LoraLayer) and f"{name}.weight" in merged:
            base: Any = module.get_base_layer()
            layer: Any = module
            added = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
            merged[f"{name}.weight"] = parts.moved((base.weight + added).detach(), HOST)
    return merged


def buffers_of(model: Model) -> dict[str, Tensor]:
    """The tensors in the transformer's files that are not parameters."""
    parameters = {name for name, _ in model.transformer.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in tensors_of(model.transformer).items() if name not in parameters}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of `state_dict`, which has the shards of a sharded module even while the module is whole."""
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}
    for prefix, inner in module.named_modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def load_weights(model: Model, directory: Path, section: str) -> None:
    """Copy the files of `weight_files` into the model's tensors; CheckpointError if one is missing or differs.

    Errors name the settings by `section`.
    """
    source = directory / (MODEL_DIR if model.adapter is None else ADAPTER_DIR)
    if model.owns_transformer:
        check_kind(source, model.adapter is not None, section)
    with boundary(f"checkpoint '{directory}': reading '{source.name}/'", CheckpointError):
        if model.adapter is not None:
            _load_adapter(model.adapter, source, section)
        elif model.owns_transformer:
            _load_transformer(model.transformer, source)
        if isinstance(model, ValueModel):
            load_value_head(model, directory / MODEL_DIR)


@torch.no_grad()
def _load_transformer(transformer: Any, source: Path) -> None:
    """Load through from_pretrained, which undoes save_pretrained's changes of names and layouts.

    It only warns about a different architecture and loads matching names, so the architecture is checked first.
    """
    found = json.loads((source / "config.json").read_text()).get("model_type")
    if found != transformer.config.model_type:
        raise CheckpointError(
            f"'{source}' holds a model of type '{found}', and this run's is a '{transformer.config.model_type}'; "
            "resume with the model of the run"
        )
    mesh = next((weight.device_mesh for weight in transformer.parameters() if isinstance(weight, DTensor)), None)
    arguments = {
        "dtype": transformer.dtype,
        "trust_remote_code": False,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # checked next, where they are named
    }
    opener = type(transformer).from_pretrained if mesh is None else partial(from_rows, type(transformer), mesh=mesh)
    try:
        check_stored("checkpoint", str(source))
        saved, loaded = opener(source, **arguments)
        check_tensors(f"checkpoint '{source}'", type(transformer).__name__, loaded, new_head=False)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    tensors = dict(saved.named_parameters())
    check_restored(source, tensors)
    parameters = dict(transformer.named_parameters())
    if {name: tensor.shape for name, tensor in tensors.items()} != {n: p.shape for n, p in parameters.items()}:
        raise CheckpointError(f"'{source}' holds another model than the one of this run")
    for name, parameter in parameters.items():
        put(parameter, tensors[name])


@torch.no_grad()
def _load_adapter(adapter: Any, source: Path, section: str) -> None:
    from peft import load_peft_weights

    saved = load_peft_weights(str(source), device="cpu")
    check_restored(source, saved)
    trained = {name: parameter for name, parameter in adapter.named_parameters() if parameter.requires_grad}
    named = {name.replace(f".{adapter.active_adapter}.", "."): tensor for name, tensor in trained.items()}
    for name in sorted(named.keys() | saved.keys()):
        found, needed = (list(tensors[name].shape) if name in tensors else "absent" for tensors in (saved, named))
        if found != needed:
            raise CheckpointError(
                f"'{source}' holds an adapter of other settings: '{name}' is {found} there and {needed} in this run; "
                f"needs the {section}.lora settings with which it was saved"
            )
    alpha = json.loads((source / "adapter_config.json").read_text())["lora_alpha"]
    if alpha != (needed := adapter.peft_config[adapter.active_adapter].lora_alpha):
        raise CheckpointError(  # it multiplies what was learned: another one makes another policy
            f"'{source}' holds an adapter that was trained with lora.alpha={alpha:g}, and this run's is {needed:g}; "
            f"needs {section}.lora.alpha={alpha:g}, or a new run that starts from the exported model"
        )
    for name, pair in named.items():
        put(pair, saved[name])
