"""Yields the weights of a model, one unit at a time: of a sharded model a device holds only its shards and one unit."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.sharded_tensors import gathered
from rlcore.engines.hf.train.shards import Shards, names_by_unit, units_of
from rlcore.engines.hf.train.state import buffers_of, merged_weights, tensors_of, whole_tensors


@torch.no_grad()
def weights_by_unit(model: Model, shards: Shards | None, *, rank: int, takers: int) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, unit by unit, on the ranks below `takers`, of which each gets a share.

    Ranks of a sharded model gather each unit together, so they get shares of every unit and must iterate to the end;
    otherwise they get shares of the whole. A tensor is on its rank's device and valid until the next one. The tensors
    have the names that `from_pretrained` expects in files, with an adapter merged into its base; tied weights occur
    once. Tensors that are not parameters are in the first unit.
    """
    units = names_by_unit(model, units_of(model)) if shards is None else shards.unit_by_unit()
    sizes = [0] * takers
    for number, names in enumerate(units):
        if rank < takers:
            tensors = merged_weights(model, names) | (buffers_of(model) if number == 0 else {})
            yield from taken(whole_tensors(model, tensors), rank, sizes).items()
            del tensors  # releases merged weights before those of the next unit are made
        if shards is not None:
            sizes = [0] * takers


def taken(tensors: Mapping[str, Tensor], rank: int, sizes: list[int]) -> dict[str, Tensor]:
    """A rank's share of tensors that several ranks have. Shares have about equal sizes, and every tensor is in one.

    The largest tensors are dealt first, each to the rank that has the fewest bytes so far. `sizes`: the bytes of each
    rank, to which those of these tensors are added.
    """
    mine = set()
    for name, tensor in sorted(tensors.items(), key=lambda named: (-named[1].nbytes, named[0])):
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
