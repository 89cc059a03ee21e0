"""Gathers the weights of a sharded model into host memory, one unit at a time.

A device therefore holds only its shards and one unit, and a process holds in host memory only one unit and what its
caller keeps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.sharded_tensors import gathered
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import buffers_of, merged_weights, tensors_of, whole_tensors
from rlcore.engines.hf.train.state_files import private_copies


@torch.no_grad()
def gathered_units(model: Model, shards: Shards, *, rank: int, takers: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(number, tensors) of this rank's units: every `takers`th one, the first on rank 0.

    All ranks must iterate to the end. The tensors are private copies in host memory, with the names that
    `from_pretrained` expects in files and an adapter merged into its base; tied weights occur once. Tensors that are
    not parameters are in the first unit.
    """
    for number, names in enumerate(shards.unit_by_unit()):
        if number % takers == rank:
            yield number, _copied(model, names, buffers=number == 0)  # keep no reference to it until the next one


@torch.no_grad()
def gathered_adapter(model: Model, shards: Shards | None, *, here: bool) -> dict[str, Tensor] | None:
    """The tensors of a LoRA model's adapter by their names in the peft model; nothing on ranks that are not `here`.

    All ranks must call this. None for an unsharded model.
    """
    if shards is None:
        return None
    found = {name: gathered(tensor) for name, tensor in tensors_of(model.adapter).items() if ".lora_" in name}
    return found if here else {}


def _copied(model: Model, names: frozenset[str], *, buffers: bool) -> dict[str, Tensor]:
    tensors = merged_weights(model, names) | (buffers_of(model) if buffers else {})
    return whole_tensors(model, private_copies(tensors))
