"""Gathers the weights of a sharded model, one unit at a time: a device holds only its shards and one unit."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.sharded_tensors import gathered
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import buffers_of, merged_weights, tensors_of, whole_tensors


@torch.no_grad()
def gathered_units(model: Model, shards: Shards, *, here: bool) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, unit by unit, on the ranks that are `here`; each on its device and valid until the next one.

    All ranks must iterate to the end. The tensors have the names that `from_pretrained` expects in files, with an
    adapter merged into its base; tied weights occur once. Tensors that are not parameters are in the first unit.
    """
    for number, names in enumerate(shards.unit_by_unit()):
        if here:
            tensors = merged_weights(model, names) | (buffers_of(model) if number == 0 else {})
            yield from whole_tensors(model, tensors).items()
            del tensors  # releases merged weights before those of the next unit are made


@torch.no_grad()
def gathered_adapter(model: Model, shards: Shards | None, *, here: bool) -> dict[str, Tensor] | None:
    """The tensors of a LoRA model's adapter by their names in the peft model; nothing on ranks that are not `here`.

    All ranks must call this. None for an unsharded model.
    """
    if shards is None:
        return None
    found = {name: gathered(tensor) for name, tensor in tensors_of(model.adapter).items() if ".lora_" in name}
    return found if here else {}
