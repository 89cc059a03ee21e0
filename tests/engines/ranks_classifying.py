"""One of four processes that score rows with one classifier in several meshes.

    python ranks_classifying.py RANK DIRECTORY MODEL

Host memory is a fake, as in ranks_offloaded.py: weights that were moved there leave NaN on the device. Each rank writes
its outputs for each mesh to DIRECTORY/found-RANK.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks_offloaded import DEVICE, HostMemory
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engines.hf import ClassifierEngine
from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.sharded_tensors import own
from rlcore.engines.hf.train.shards import Shards
from rlcore.types import SharedPrefix

MESHES: dict[str, dict[str, Any]] = {
    "two sharded": {"data_parallel": 2, "sharding": "fsdp2"},
    "four sharded": {"data_parallel": 4, "sharding": "fsdp2"},
    "two copies": {"data_parallel": 4, "sharding": "fsdp2", "dp_replicate": 2},
    "four whole": {"data_parallel": 4},
    "four slices": {"data_parallel": 4, "context_parallel": 4},
    "two slices, sharded": {"data_parallel": 4, "context_parallel": 2, "sharding": "fsdp2"},
}
DTYPES = ("float64", "float32")


def rows() -> list[list[int]]:
    """Rows of 1 to 59 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 200, length).tolist() for length in (1, 59, 7, 30, 2, 31, 12, 12, 25)]


def refuse(*args: Any, **settings: Any) -> None:
    """In place of what reads or gathers a whole model on a rank."""
    raise AssertionError("a rank had the whole model")


def check_sharded(engine: ClassifierEngine, rank: int) -> None:
    """ValueError when this rank has more than its rows of a parameter."""
    for name, weight in engine.model.named_parameters():
        if not isinstance(weight, DTensor) or (len(weight) > 1 and own(weight).numel() == weight.numel()):
            raise ValueError(f"{name} is whole on rank {rank}")


def scored(ranks: Ranks, path: str, mesh: dict[str, Any], dtype: str, memory: HostMemory) -> list[Any]:
    """Outputs of all rows, of one, and of all again after the weights were in host memory."""
    config: Any = EngineConfig(dtype=dtype, micro_batch_tokens=64, offload=True, **mesh)
    way = SharedPrefix.TREE if config.context_parallel > 1 else SharedPrefix.NONE
    engine = ClassifierEngine(
        ModelConfig(path=path), config, name="reward", device=str(DEVICE), shared_prefix=way, ranks=ranks
    )
    engine.begin_updates()
    found = [engine.outputs(rows()), engine.outputs(rows()[3:4])]
    if config.sharding != "none":
        check_sharded(engine, ranks.rank)
    engine.end_updates()
    rested = [own(weight) for weight in engine.model.parameters() if own(weight).numel()]
    if not memory.held or not all(bool(weight.isnan().all()) for weight in rested):
        raise ValueError("weights stayed on the device")
    engine.begin_updates()
    return [outputs.tolist() for outputs in (*found, engine.outputs(rows()))]


def main(rank: str, directory: str, path: str) -> None:
    """One rank's part; those beyond a mesh's ranks wait for the next."""
    torch.set_num_threads(1)
    from_whole, whole = AutoModelForSequenceClassification.from_pretrained, Shards.whole
    found = {}
    for name, mesh in MESHES.items():
        if int(rank) >= mesh["data_parallel"]:
            continue
        meet = f"file://{directory}/{name.replace(' ', '-')}"
        ranks = Ranks(int(rank), mesh["data_parallel"], meet, DEVICE, mesh.get("context_parallel", 1))
        sharded = "sharding" in mesh
        setattr(AutoModelForSequenceClassification, "from_pretrained", refuse if sharded else from_whole)  # noqa: B010 - a trap
        setattr(Shards, "whole", refuse if sharded else whole)  # noqa: B010 - as above
        for dtype in DTYPES:
            memory = HostMemory()
            setattr(parts, "begin_move", memory.moved)  # noqa: B010 - a fake in place of an accelerator
            found[f"{name}, {dtype}"] = scored(ranks, path, mesh, dtype, memory)
        instructions = [ranks.instructed({"number": number} if rank == "0" else None) for number in range(2)]
        if instructions != [{"number": 0}, {"number": 1}]:
            raise ValueError(f"instructed: {instructions}")
        ranks.gather({})
        ranks.close()
    (Path(directory) / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
