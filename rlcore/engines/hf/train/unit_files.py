"""The files of a sharded model: one per unit, produced by the ranks in turn in a checkpoint.

Ranks gather one unit at a time, and one of them in turn writes or copies it. So a rank holds only its shards, one unit
and its copies. `from_pretrained` opens the directory: names and index are those that transformers writes for large
models.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import INDEX, buffers_of, merged_weights, stored_tensors, transformer_settings
from rlcore.engines.hf.train.state_files import OF_TORCH, StateFile, write_files
from rlcore.errors import CheckpointError, boundary


@torch.no_grad()
def unit_files(model: Model, shards: Shards, ranks: Ranks, *, takers: int) -> Iterator[StateFile]:
    """This rank's files: every `takers`th unit; rank 0 has the first unit and the remaining files.

    All ranks must iterate to the end; none waits for files of others. A LoRA adapter is merged.
    """
    if ranks.rank == 0:
        yield from transformer_settings(model)
    weight_map: dict[str, str] = {}
    size = 0
    for number, names in enumerate(shards.unit_by_unit()):
        if number % takers == ranks.rank:
            file = f"model-{number + 1:05d}-of-{shards.num_units:05d}.safetensors"
            tensors = merged_weights(model, names) | (buffers_of(model) if number == 0 else {})
            found = stored_tensors(model, tensors)
            weight_map |= dict.fromkeys(found, file)
            size += sum(tensor.numel() * tensor.element_size() for tensor in found.values())
            yield StateFile(file, found, OF_TORCH, found.keys() - buffers_of(model).keys())
            del tensors, found  # releases merged weights before those of the next unit are made
    parts = ranks.gather({"weight_map": weight_map, "size": size})
    if ranks.rank == 0:
        yield _index(parts)


def save_whole_in_units(model: Model, shards: Shards, ranks: Ranks, directory: Path) -> None:
    """Write the model into `directory` on rank 0, with an adapter merged into its base; all ranks must call this."""
    with boundary(f"weights in '{directory}'", CheckpointError):
        write_files(unit_files(model, shards, ranks, takers=1), directory)


def _index(parts: list[dict[str, Any]]) -> StateFile:
    """The index file, which maps tensors to files."""
    weight_map = {name: file for part in parts for name, file in part["weight_map"].items()}
    metadata = {"total_size": sum(part["size"] for part in parts)}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return StateFile(INDEX, (json.dumps(index, indent=2) + "\n").encode())
