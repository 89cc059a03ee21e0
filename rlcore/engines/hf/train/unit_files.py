"""Writes a sharded model: a file per unit, in a checkpoint each by another rank in turn.

Ranks gather one unit after the other, and the rank whose turn it is writes it at once. So none of them ever holds more
of the weights than its shards and two units, in device and in host memory. `from_pretrained` opens the directory: names
and index are those that transformers writes itself for large models.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.hf.load_saved import MODEL_DIR
from rlcore.engines.hf.train.gather import gathered_units
from rlcore.engines.hf.train.model import Model
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.shards import Shards
from rlcore.errors import CheckpointError, boundary

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def save_in_units(model: Model, shards: Shards | None, ranks: Ranks | None, directory: Path) -> bool:
    """Write `model/` below `directory`, which all ranks see; all have to come here.

    False, and nothing is written, where the weights are not sharded, not the model's, or those of an adapter alone.
    CheckpointError of the rank that cannot write.
    """
    if shards is None or ranks is None or model.adapter is not None or not model.owns_transformer:
        return False
    with boundary(f"checkpoint '{directory}': writing the model on rank {ranks.rank}", CheckpointError):
        _save(model, shards, ranks, directory / MODEL_DIR, writers=ranks.num)
    return True


def save_whole_in_units(model: Model, shards: Shards, ranks: Ranks, directory: Path) -> None:
    """Write the model into `directory` on rank 0, an adapter merged into its base; all ranks have to come here."""
    with boundary(f"weights in '{directory}'", CheckpointError):
        _save(model, shards, ranks, directory, writers=1)


def _save(model: Model, shards: Shards, ranks: Ranks, target: Path, writers: int) -> None:
    weight_map: dict[str, str] = {}
    size = 0
    if ranks.rank == 0:  # first, because it removes what looks like files of another save
        model.transformer.save_pretrained(target, state_dict={})
    ranks.gather({})
    for number, tensors in gathered_units(model, shards, rank=ranks.rank, takers=writers):
        name = f"model-{number + 1:05d}-of-{shards.num_units:05d}.safetensors"
        weight_map |= dict.fromkeys(_save_file(model, tensors, target / name), name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        tensors.clear()
    parts = ranks.gather({"weight_map": weight_map, "size": size})
    if ranks.rank == 0:
        _save_index(target, parts)


def _save_file(model: Model, tensors: dict[str, Tensor], path: Path) -> list[str]:
    """The names of the tensors in the file."""
    from safetensors.torch import save_file

    for name in getattr(model.transformer, "_keys_to_ignore_on_save", None) or ():
        tensors.pop(name, None)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return list(tensors)


def _save_index(target: Path, parts: list[dict[str, Any]]) -> None:
    """Write the file that says where each tensor is."""
    (target / "model.safetensors").unlink(missing_ok=True)
    weight_map = {name: file for part in parts for name, file in part["weight_map"].items()}
    metadata = {"total_size": sum(part["size"] for part in parts)}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
