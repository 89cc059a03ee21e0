"""Checks the number formats of a checkpoint, and initializes masters from it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlcore.contracts.model_files import check_model_files
from rlcore.engines.hf.train.sharded_tensors import own
from rlcore.errors import ConfigError

NARROW = ("F8", "F6_", "F4")
"""Prefixes of safetensors formats of 8 bits and fewer, whose numbers need scales from other tensors."""
WIDE = ("F64", "F32", "BF16", "F16")
"""Formats that a weight may have; other tensors, such as masks and positions, may be integers."""


def check_stored(path_key: str, path: str) -> None:
    """ConfigError for a model directory whose files transformers must not read, or hold quantised or integer weights.

    A path that is not a directory passes.
    """
    directory = Path(path)
    check_model_files(f"{path_key}='{path}'", directory)
    config_file = directory / "config.json"
    if config_file.is_file():
        check_not_quantised(path_key, path, json.loads(config_file.read_text("utf-8")).get("quantization_config"))
    for file in filter(Path.is_file, sorted(directory.glob("*.safetensors"))):
        for name, found in _formats(file):
            if found.startswith(NARROW) or (name.endswith("weight") and found not in WIDE):
                raise ConfigError(
                    f"{path_key}='{path}': tensor '{name}' is stored as {found}, which training cannot start from; "
                    "needs float32, bfloat16 or float16: choose the checkpoint that this one was quantised from"
                )


def check_not_quantised(path_key: str, path: str, settings: Any) -> None:
    """ConfigError if a model's configuration says that it is quantised."""
    if settings:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else type(settings).__name__
        raise ConfigError(
            f"{path_key}='{path}': its weights are quantised (quant_method={method}), which training cannot start "
            "from; needs float32, bfloat16 or float16: choose the checkpoint that this one was quantised from"
        )


def check_range(
    path_key: str, path: str, dtype_key: str, weights: Mapping[str, Tensor], mesh: DeviceMesh | None = None
) -> None:
    """ConfigError if a float16 weight is infinite or NaN, as values above 65504 in another format become.

    With a mesh `weights` are this rank's rows, and all ranks raise the same error.
    """
    bad = [bool((~weight.isfinite()).any()) for weight in weights.values() if weight.dtype == torch.float16]
    first = torch.tensor(bad.index(True) if True in bad else len(bad))
    if mesh is not None:
        first = first.to(mesh.device_type)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=mesh.get_group(mesh.ndim - 1))
    if int(first) < len(bad):
        name = [name for name, weight in weights.items() if weight.dtype == torch.float16][int(first)]
        raise ConfigError(
            f"{path_key}='{path}': weight '{name}' has numbers that float16 does not hold (65504 at most); choose "
            f"{dtype_key}=bfloat16 or float32"
        )


@torch.no_grad()
def check_activations(path_key: str, path: str, dtype_key: str, model: Any) -> None:
    """ConfigError when a float16 model gives infinite or NaN hidden states for eight tokens.

    Models that were trained in bfloat16 have activations above 65504. Longer prompts may overflow where eight tokens do
    not; such updates are skipped.
    """
    embeddings = model.get_input_embeddings().weight
    if embeddings.dtype != torch.float16:
        return
    probe_BT = (torch.arange(8, device=embeddings.device) * 7919 % len(embeddings))[None]
    hidden_BTH = model.base_model(input_ids=probe_BT, use_cache=False).last_hidden_state
    if not bool(hidden_BTH.isfinite().all()):
        raise ConfigError(
            f"{path_key}='{path}': its activations overflow in float16 (65504 at most); choose {dtype_key}=bfloat16 or "
            "float32"
        )


def start_masters(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `stored`, the same model in float32, for `model`'s trainable half-precision parameters.

    Keys are parameter names; for a sharded model `stored` holds this rank's rows. The tensors are on the parameter's
    device; on a CPU they are those of `stored` itself.
    """
    masters = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name in stored and stored[name].shape == own(parameter).shape:
            masters[name] = stored[name].detach().to(parameter.device)
    return masters


def _formats(file: Path) -> Iterator[tuple[str, str]]:
    """Name and number format of each tensor of a safetensors file; nothing for other files."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(length)) if length < 2**27 else {}
        except (ValueError, RecursionError):  # loading it reports the error
            return
    for name, tensor in header.items() if isinstance(header, dict) else ():
        if name != "__metadata__" and isinstance(tensor, dict):
            yield name, str(tensor.get("dtype", ""))
