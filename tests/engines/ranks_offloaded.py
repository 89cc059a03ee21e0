"""One of two processes that train a sharded model with and without offload.

    python ranks_offloaded.py RANK DIRECTORY MODEL DTYPE

Host memory is a fake, as in test_hf_offload.py: weights that were moved there leave NaN on the device. Each
rank writes what it found to DIRECTORY/found-RANK.json: what was computed, digests of what was saved, and what rested.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.optimizer import MasterAdamW
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.weight_server import host_copies
from rlcore.testing.tiny import random_batch

DEVICE = torch.device("cpu:0")
MOVE_STATE = MasterAdamW.to


class HostMemory:
    """Holds what is moved to the host; the engine is left with weights of NaN, unless it writes others there.

    The optimizer's state is left as it is: it is saved where it rests.
    """

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}
        self.hides = True

    def moving_state(self, optimizer: MasterAdamW, device: torch.device) -> None:
        """In place of `MasterAdamW.to`."""
        self.hides = False
        MOVE_STATE(optimizer, device)
        self.hides = True

    def moved(self, tensor: Tensor, device: torch.device) -> Tensor:
        """In place of `begin_move`."""
        to_host = device.index is None
        if not tensor.numel() or to_host == (tensor.data_ptr() in self.held):
            return tensor
        if not to_host:
            held = self.held.pop(tensor.data_ptr())
            return held if bool(tensor.isnan().all()) else tensor.clone()
        hidden = torch.full_like(tensor, float("nan")) if self.hides else tensor.clone()
        self.held[hidden.data_ptr()] = tensor
        return hidden


def digest(directory: Path, rank: int) -> dict[str, str]:
    """Of this rank's files."""
    mine = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(mine)}


def engine_of(ranks: Ranks, path: str, dtype: str, offload: bool) -> TrainEngine:
    config: Any = EngineConfig(
        dtype=dtype, data_parallel=2, sharding="fsdp2", lr=1e-2, micro_batch_tokens=40, offload=offload
    )
    policy_loss = PolicyLoss(clip, AlgoConfig())
    return TrainEngine(
        "causal_lm", ModelConfig(path=path), config, policy_loss, seed=3, ranks=ranks, device=str(DEVICE), num_updates=9
    )


def trained(ranks: Ranks, directory: Path, path: str, dtype: str, offload: bool, memory: HostMemory) -> dict[str, Any]:
    """Two steps, a restart and one more, with everything that gathers weights between."""
    engine = engine_of(ranks, path, dtype, offload)
    rested = [sum(tensor.nbytes for tensor in memory.held.values())]
    seen: list[Any] = []

    def step(seed: int) -> None:
        seen.append(engine.logprobs(random_batch(seed=seed)).tolist())
        engine.begin_updates()
        for number in range(2):
            metrics = engine.update(random_batch(seed=10 * seed + number))
            seen.append({name: value for name, value in metrics.items() if not name.startswith("time/")})
        engine.end_updates()
        rested.append(sum(tensor.nbytes for tensor in memory.held.values()))

    step(1)
    engine.save(directory / "saved")
    engine.snapshot()
    rested.append(sum(tensor.nbytes for tensor in memory.held.values()))
    copied = floats(host_copies(engine.named_weights()))
    whole = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in copied.items()}
    step(2)
    engine.write_snapshot(directory / "copied")
    ranks.gather({})
    memory.held.clear()
    engine = engine_of(ranks, path, dtype, offload)
    engine.restore(directory / "saved")
    rested.append(sum(tensor.nbytes for tensor in memory.held.values()))
    step(2)
    engine.save(directory / "end")
    ranks.gather({})
    files = {name: digest(directory / name, ranks.rank) for name in ("saved", "copied", "end")}
    return {"seen": seen, "whole": whole, "files": files, "rested": rested}


def floats(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in tensors.items()}


def main(rank: str, directory: str, path: str, dtype: str) -> None:
    torch.set_num_threads(1)
    ranks = Ranks(int(rank), 2, f"file://{directory}/meet", DEVICE)
    found = {}
    for offload in (False, True):
        memory = HostMemory()
        setattr(parts, "begin_move", memory.moved)  # noqa: B010 - a fake in place of an accelerator
        setattr(MasterAdamW, "to", lambda optimizer, device, memory=memory: memory.moving_state(optimizer, device))  # noqa: B010 - as above
        (Path(directory) / str(offload)).mkdir(exist_ok=True)
        found[str(offload)] = trained(ranks, Path(directory) / str(offload), path, dtype, offload, memory)
    ranks.gather({})
    (Path(directory) / f"found-{rank}.json").write_text(json.dumps(found))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
