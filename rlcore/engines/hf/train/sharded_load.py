"""Opens a transformers model so that each rank reads only its rows.

The model is built on the meta device. transformers then reads this rank's rows of each tensor in the files, under the
model's names, and computes tensors that are not in the files. Rows are split as in FSDP2.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlcore.engines.hf.train.sharded_tensors import like, own, part_of, placeholder, placements, rows_of

Rows = dict[str, Tensor]
"""This rank's rows of each parameter, by its name in the transformer; tied parameters once."""


def open_rows(opener: Any, path: str, mesh: DeviceMesh, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """`opener.from_pretrained(path, output_loading_info=True)`, with DTensors of this rank's rows as parameters.

    If transformers builds tensors from several in the files, as for most mixtures of experts, the model is read whole
    into host memory. `arguments` are those of `from_pretrained`.
    """
    from transformers import AutoConfig
    from transformers.models.auto.auto_factory import _get_model_class

    config: Any = AutoConfig.from_pretrained(path, revision=arguments.get("revision", "main"), trust_remote_code=False)
    model_class: Any = _get_model_class(config, opener._model_mapping)  # type: ignore[no-untyped-call]
    if model_class.config_class == config.sub_configs.get("text_config"):
        config = config.get_text_config()
    found: tuple[Any, dict[str, Any]] = from_rows(
        model_class, path, mesh, config=config, output_loading_info=True, **arguments
    )
    return found


def from_rows(model_class: Any, path: str | Path, mesh: DeviceMesh, **arguments: Any) -> Any:
    """`model_class.from_pretrained(path, **arguments)`, with parameters as in `open_rows`."""

    class Parted(model_class):  # type: ignore[misc]
        def __init__(self, *configs: Any, **settings: Any) -> None:
            super().__init__(*configs, **settings)
            if not _is_converted(self):
                _replace(self, lambda parameter: _rows_on_meta(parameter, mesh))

    for name in ("__name__", "__qualname__", "__module__"):  # errors and files name the class
        setattr(Parted, name, getattr(model_class, name))
    found = Parted.from_pretrained(path, **arguments)
    model = found[0] if isinstance(found, tuple) else found
    model.__class__ = model_class
    return found


@torch.no_grad()
def take_rows(model: nn.Module, mesh: DeviceMesh) -> Rows:
    """Take this rank's rows from a model of `open_rows`; its parameters become placeholders on the mesh's device."""
    rows: Rows = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            rows[name] = own(parameter).detach()
        else:
            part = rows_of(len(parameter), *part_of(mesh))
            rows[name] = parameter.detach()[part].to(mesh.device_type, copy=True)
    _replace(model, lambda parameter: placeholder(parameter).to(mesh.device_type))
    return rows


def forget(model: nn.Module, names: Collection[str]) -> None:
    """Move the parameters of these names to torch's meta device, on which they have shapes and no values."""
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    _replace(
        model,
        lambda parameter: (
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta") if id(parameter) in chosen else parameter
        ),
    )


def fill(model: nn.Module, rows: Rows) -> None:
    """Give a sharded model's parameters on the meta device this rank's rows, which are not copied."""
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    _replace(
        model,
        lambda parameter: like(rows[named[id(parameter)]], parameter) if named[id(parameter)] in rows else parameter,
    )


def _rows_on_meta(parameter: Tensor, mesh: DeviceMesh) -> Tensor:
    part = rows_of(len(parameter), *part_of(mesh))
    local = torch.empty(part.stop - part.start, *parameter.shape[1:], dtype=parameter.dtype, device="meta")
    return DTensor.from_local(
        local, mesh, placements(mesh), run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _is_converted(model: Any) -> bool:
    """True if a tensor of the model may be built from several in its files, so that the rows do not correspond."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(entry, WeightConverter) for entry in get_model_conversion_mapping(model))


def _replace(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter by the result of `make`; tied ones stay tied, frozen ones frozen."""
    made: dict[int, nn.Parameter] = {}
    before = [*model.parameters()]  # keeps ids unique meanwhile
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                new = make(parameter)
                made[id(parameter)] = (
                    parameter if new is parameter else nn.Parameter(new, requires_grad=parameter.requires_grad)
                )
            module._parameters[name] = made[id(parameter)]
    before.clear()
