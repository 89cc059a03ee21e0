"""Checks that a model's numbers fit a half-precision format, and initializes masters from a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlcore.engines.hf.train.sharded_tensors import own
from rlcore.errors import ConfigError


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
