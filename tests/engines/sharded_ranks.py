"""One of two processes that load, score, train, save and resume a sharded model, checked against the whole one.

    python sharded_ranks.py RANK DIRECTORY MODEL DTYPE KIND [lora]

Prints what was compared as one JSON line; a difference ends the process with an error.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.data.batch import select
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.model import ModelKind, ValueModel, load_masters, load_model
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.sharded_tensors import gathered, own
from rlcore.engines.hf.train.state import whole_tensors
from rlcore.engines.weight_server import host_copies
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch, Float32s

NUM = 2


class Story:
    """A rank's engines and what they are compared in."""

    def __init__(self, rank: int, directory: Path, path: Path, dtype: str, kind: str, lora: bool) -> None:
        torch.set_num_threads(1)
        self.ranks = Ranks(rank, NUM, f"file://{directory / 'meet'}", torch.device("cpu"))
        self.directory, self.kind, self.lora = directory, ModelKind(kind), LoraConfig(enabled=lora, rank=2)
        self.model = ModelConfig(path=str(path))
        self.config = EngineConfig(
            dtype=dtype, data_parallel=NUM, sharding="fsdp2", lr=1e-2, lora=self.lora, micro_batch_tokens=40
        )
        self.compared: dict[str, int] = {}

    def engine(self, model: Any = None, config: EngineConfig | None = None, ranks: bool = True) -> TrainEngine:
        loss = PolicyLoss(clip, AlgoConfig()) if self.kind is ModelKind.CAUSAL_LM else None
        engine = TrainEngine(
            self.kind, model or self.model, config or self.config, loss, seed=3, ranks=self.ranks if ranks else None
        )
        engine.expect(100)
        return engine

    def same(self, what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        if ours.keys() != theirs.keys():
            raise ValueError(f"{what}: {sorted(ours)} and {sorted(theirs)}")
        for name, tensor in ours.items():
            if tensor.dtype != theirs[name].dtype or not torch.equal(tensor, theirs[name]):
                raise ValueError(f"{what}: {name} differs")
        self.compared[what] = len(ours)

    def start(self) -> TrainEngine:
        """Loaded in parts, parameters, masters and buffers are those of the model that is loaded whole."""
        torch.manual_seed(3 * 1_000_003)
        whole = load_model(self.kind, self.model, dtype=self.config.dtype, device="cpu", lora=self.lora)
        masters = load_masters(self.kind, self.model, whole, "model.path")
        engine = self.engine()
        shards = dict(engine.model.named_parameters())
        for name, shard in shards.items():
            if len(shard) > 1 and own(shard).numel() == shard.numel():
                raise ValueError(f"{name} is whole on rank {self.ranks.rank}")
        self.same(
            "parameters",
            {name: gathered(shard).detach() for name, shard in shards.items()},
            {name: parameter.detach() for name, parameter in whole.named_parameters()},
        )
        ours = {name: gathered(master).detach() for name, master in engine._optimizer.half_masters().items()}
        if self.kind is ModelKind.VALUE:  # without a loss nothing is trained
            masters = {}
        if self.lora.enabled:  # its adapters are not in the files
            ours = {name: master for name, master in ours.items() if ".lora_" not in name}
        self.same("masters", ours, {name: master.detach() for name, master in masters.items()})
        self.same("buffers", dict(engine.model.named_buffers()), dict(whole.named_buffers()))
        return engine

    def scores(self, engine: TrainEngine) -> None:
        """Scores a layer at a time are those of whole weights, whatever the number of passes of each rank."""
        if isinstance(engine.model, ValueModel):  # its head begins at 0
            generator = torch.Generator().manual_seed(1)
            engine.model.set_head(torch.randn(1, engine.model.value_head.in_features, generator=generator), None)
        for name, rows in {"nine": range(9), "five": [0, 1, 2, 4, 7], "one": [6]}.items():
            batch = select(random_batch(num_groups=3, samples=3, seed=5), list(rows))
            found = self.scored(engine, batch)
            if any(not isinstance(weight, DTensor) for weight in engine.model.parameters()):
                raise TypeError("weights are whole after a score")
            with engine.whole():
                expected = self.scored(engine, batch)
            if not np.array_equal(found, expected) or not np.abs(found).max() > 1e-3:
                raise ValueError(f"scores of {name}: {np.abs(found - expected).max()} of {np.abs(found).max()}")
            self.compared[f"scores of {name}"] = found.size

    def scored(self, engine: TrainEngine, batch: Batch) -> Float32s:
        return engine.values(batch) if self.kind is ModelKind.VALUE else engine.logprobs(batch)

    def written(self, engine: TrainEngine) -> None:
        """Weights that are handed over and saved in units are those of the whole model."""
        engine.save_whole(self.directory / "streamed")
        copied = host_copies(engine.named_weights())
        with engine.whole():
            expected = {name: tensor.clone() for name, tensor in whole_tensors(engine.model).items()}
        if self.ranks.rank == 0:
            self.same("copied", dict(sorted(copied.items())), dict(sorted(expected.items())))
            files = sorted((self.directory / "streamed").glob("*.safetensors"))
            found = {name: tensor for file in files for name, tensor in load_file(file).items()}
            if len(files) != engine._shards.num_units:
                raise ValueError(f"{len(files)} files")
            self.same("written", dict(sorted(found.items())), dict(sorted(expected.items())))
        elif copied:
            raise ValueError("both ranks have a copy")

    def resumed(self, engine: TrainEngine) -> None:
        """An update after a restore gives the bits of one without."""
        batches = [random_batch(seed=seed) for seed in (5, 6)]
        engine.update(batches[0])
        engine.save(self.directory / "checkpoint")
        dist.barrier()
        engine.update(batches[1])
        expected = self.everything(engine)
        other = self.engine()
        other.restore(self.directory / "checkpoint")
        other.update(batches[1])
        self.same("resumed", self.everything(other), expected)

    def trained(self) -> None:
        """An update of what was loaded in parts gives the bits of one that was loaded whole and then sharded."""
        ends = []
        for model in (self.model, load_model(self.kind, self.model, dtype="float32", device="cpu")):
            engine = self.engine(model, replace(self.config, dtype="float32", lora=LoraConfig()))
            engine.update(random_batch(seed=5))
            ends.append(self.everything(engine))
        self.same("trained", *ends)

    @staticmethod
    def everything(engine: TrainEngine) -> dict[str, Tensor]:
        """Copies of this rank's weights and of its optimizer's state."""
        weights = {name: own(weight).detach().clone() for name, weight in engine.model.named_parameters()}
        return weights | {name: rows.tensor.clone() for name, rows in engine._optimizer.state()[0].items()}


def main(rank: str, directory: str, path: str, dtype: str, kind: str, *lora: str) -> None:
    """One rank's part in the story."""
    story = Story(int(rank), Path(directory), Path(path), dtype, kind, bool(lora))
    engine = story.start()
    story.scores(engine)
    story.written(engine)
    if story.kind is ModelKind.CAUSAL_LM:
        story.resumed(engine)
        story.trained()
    story.ranks.close()
    print(json.dumps(story.compared))


if __name__ == "__main__":
    main(*sys.argv[1:])
