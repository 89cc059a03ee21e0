"""The files of `model/` of a sharded model: one per unit, each made by another rank in turn.

Ranks gather one unit after the other, and the rank whose turn it is has it to write or to copy. So none of them holds
more of the weights than its shards, one unit and what it copies. `from_pretrained` opens the directory: names and index
are those that transformers writes itself for large models.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.hf.train.model import Model
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import INDEX, merged_weights, stored_tensors, tensors_of, transformer_settings
from rlcore.engines.hf.train.state_files import OF_TORCH, StateFile


@torch.no_grad()
def unit_files(model: Model, shards: Shards, ranks: Ranks) -> Iterator[StateFile]:
    """This rank's files of the directory; all ranks have to go through, and none of them waits for files of others."""
    if ranks.rank == 0:
        yield from transformer_settings(model)
    weight_map: dict[str, str] = {}
    size = 0
    for number, names in enumerate(shards.unit_by_unit()):
        if number % ranks.num != ranks.rank:
            continue
        tensors = merged_weights(model, names)
        if number == 0:
            tensors |= _buffers(model)
        file = f"model-{number + 1:05d}-of-{shards.num_units:05d}.safetensors"
        found = stored_tensors(model, tensors)
        weight_map |= dict.fromkeys(found, file)
        size += sum(tensor.numel() * tensor.element_size() for tensor in found.values())
        yield StateFile(file, found, OF_TORCH)
    parts = ranks.gather({"weight_map": weight_map, "size": size})
    if ranks.rank == 0:
        yield _index(parts)


def _buffers(model: Model) -> dict[str, Tensor]:
    """The tensors of the transformer's files other than parameters."""
    parameters = {name for name, _ in model.transformer.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in tensors_of(model.transformer).items() if name not in parameters}


def _index(parts: list[dict[str, Any]]) -> StateFile:
    """The file that says where each tensor is."""
    weight_map = {name: file for part in parts for name, file in part["weight_map"].items()}
    metadata = {"total_size": sum(part["size"] for part in parts)}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return StateFile(INDEX, (json.dumps(index, indent=2) + "\n").encode())
