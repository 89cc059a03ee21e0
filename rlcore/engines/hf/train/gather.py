"""Gathers the weights of a sharded model, one unit at a time: a device holds only its shards and one unit."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.sharded_tensors import gathered
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import buffers_of, merged_weights, tensors_of, whole_tensors


@torch.no_grad()
def gathered_units(model: Model, shards: Shards, *, rank: int, takers: int) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, unit by unit, on the ranks below `takers`, of which each gets a share of every unit.

    All ranks must iterate to the end. A tensor is on its rank's device and valid until the next one. The tensors have
    the names that `from_pretrained` expects in files, with an adapter merged into its base; tied weights occur once.
    Tensors that are not parameters are in the first unit.
    """
    for number, names in enumerate(shards.unit_by_unit()):
        if rank < takers:
            tensors = merged_weights(model, names) | (buffers_of(model) if number == 0 else {})
            yield from taken(whole_tensors(model, tensors), rank, takers).items()
            del tensors  # releases merged weights before those of the next unit are made


def taken(tensors: Mapping[str, Tensor], rank: int, takers: int) -> dict[str, Tensor]:
    """A rank's share of tensors that several ranks have. Shares have about equal sizes, and every tensor is in one.

    The largest tensors are dealt first, each to the rank that has the fewest bytes so far.
    """
    sizes, mine = [0] * takers, set()
    for name, tensor in sorted(tensors.items(), key=lambda named: -named[1].nbytes):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += tensor.nbytes
        if smallest == rank:
            mine.add(name)
    return {name: tensor for name, tensor in tensors.items() if name in mine}


@torch.no_grad()
def gathered_adapter(model: Model, shards: Shards | None, *, here: bool) -> dict[str, Tensor] | None:
    """The tensors of a LoRA model's adapter by their names in the peft model; nothing on ranks that are not `here`.

    All ranks must call this. None for an unsharded model.
    """
    if shards is None:
        return None
    found = {name: gathered(tensor) for name, tensor in tensors_of(model.adapter).items() if ".lora_" in name}
    return found if here else {}
