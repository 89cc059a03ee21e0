"""Measures the peak memory per rank of a sharded actor, and the plan's estimate: 7B, 14B and 32B on 8 and 64 ranks.

    .venv/bin/python benchmarks/sharding.py [--smoke] [--models 7B 14B 32B] [--ranks 8 64] [--layers 4]
        [--out docs/results/sharding]

The engine itself runs, on fake tensors and a fake process group. Operations run without data, and the bytes of living
storages are added up. The figures are those of rank 0, which needs the most, because it also gathers the weights for
writing. Micro-batches are short, so the numbers are those of weights, gradients and optimizer state. Rows of OUT.json
that are not measured again stay, with the commit of their measurement.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import conclude, machine, made_by, say
from torch import Tensor
from without_data import FakeFile, LiveBytes, OneRank, without_data

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.engines.hf.train.engine import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.state import merged_weights
from rlcore.engines.hf.train.state_files import private_copies
from rlcore.plan.sharded_memory import sharded_bytes
from rlcore.testing.tiny import random_batch

HEADS = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, int]] = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {**HEADS, "num_key_value_heads": 4},
    "14B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
    | HEADS,
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | HEADS,
}
"""Shapes of Qwen2.5 by number of parameters."""
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2} | {
    **HEADS,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
PHASES = ("start", "update", "score", "hand-over")
BEFORE = {
    ("7B", 8): (49.3, 28.6),
    ("7B", 64): (47.7, 17.8),
    ("14B", 8): (92.9, 54.5),
    ("14B", 64): (89.8, 33.4),
    ("32B", 8): (206, 117),
    ("32B", 64): (186, 70.6),
}
"""(GiB at the start, GiB with whole weights) of the same measurement with the engine of commit 91af3014, of which each
rank loaded the whole model."""
EXPLAINED = (
    "Peak GiB of rank 0 in each phase, bfloat16 with float32 masters and moments. `held`: between two steps, shared",
    "out. `plan`: the largest phase as the plan counts it, without activations and the CUDA context, which come on",
    "top; ranks with an embedded sampler have the whole weights once more while they sample. `on the host`: the copy",
    "that the first rank hands over. `before`: the largest phase where each rank loaded the whole model and made",
    "masters of it, which kept 14B off cards of 80 GB. `commit`: of the tree that was measured.",
    "",
    "An update here is one micro-batch. With several, the float32 sums of the gradients exist besides gathered",
    "layers: 4 bytes per parameter over the number of ranks, 15.3 GiB for 32B on 8. The plan counts them, unless a",
    "step is one micro-batch, so it refuses 32B on 8 cards of 80 GB where there are several.",
)


def write_model(directory: Path, shape: Mapping[str, int]) -> int:
    """Write a model directory whose file of tensors has only a header; returns the number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen2", **shape, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    FakeFile.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    config.save_pretrained(directory)
    header = b"{}"
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return sum(parameter.numel() for parameter in model.parameters())


def settings(num: int) -> EngineConfig:
    """The settings of the engine that is measured."""
    return EngineConfig(
        dtype="bfloat16",
        data_parallel=num,
        sharding="fsdp2",
        micro_batch_tokens=16,
        gradient_checkpointing=True,
    )


def measured(shape: Mapping[str, int], num: int) -> dict[str, int]:
    """Bytes by phase, bytes of the plan, and the number of parameters."""
    live = LiveBytes()
    with tempfile.TemporaryDirectory(prefix="sharding-") as scratch:
        found = {"parameters": write_model(Path(scratch), shape)}
        config = settings(num)
        with without_data(num, live):
            loss = PolicyLoss(clip, AlgoConfig())
            engine = TrainEngine("causal_lm", ModelConfig(path=scratch), config, loss, ranks=OneRank(num))
            engine.expect(10)
            found["start"], _ = live.phase()
            batch = random_batch(num_groups=1, samples=1)
            engine.update(batch)  # creates the optimizer's state
            live.phase()
            engine.update(batch)
            found["update"], found["held"] = live.phase()
            engine.logprobs(batch)
            found["score"], _ = live.phase()
            weights: dict[
                str, Tensor
            ] = {}  # in place of `named_weights`: it compares addresses, which these tensors lack
            for names in engine._shards.unit_by_unit() if engine._shards else ():
                weights |= private_copies(merged_weights(engine.model, names))
            peak, _ = live.phase()
            found["on the host"] = sum(tensor.nbytes for tensor in weights.values())
            found["hand-over"] = peak - found["on the host"]  # at its end all of it is on the host
    found["plan"] = planned(found["parameters"], shape, config)
    return found


def planned(parameters: int, shape: Mapping[str, int], config: EngineConfig) -> int:
    """The plan's bytes without activations and context."""
    sizes = (shape[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    kv_size = shape["num_key_value_heads"] * shape["head_dim"]
    model = ModelFacts(parameters, ModelShape("qwen2", *sizes, kv_size, shape["vocab_size"], full_attention=True))
    return max(sharded_bytes(config, model).values())


def report(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The page."""
    columns = (*PHASES, "held", "plan", "on the host")
    lines = ["# Memory of sharded ranks", "", made_by("sharding.py", facts), ""]
    lines += ["| model | ranks | " + " | ".join(columns) + " | before | commit |", "|---" * (len(columns) + 4) + "|"]
    for row in rows:
        sizes = " | ".join(f"{row[column] / 2**30:.1f}" for column in columns)
        before = max(BEFORE.get((row["model"], row["ranks"]), (0.0,)))
        lines.append(f"| {row['model']} | {row['ranks']} | {sizes} | {before or '-'} | {row['commit']} |")
    return "\n".join([*lines, "", *EXPLAINED]) + "\n"


def kept(file: Path) -> list[dict[str, Any]]:
    """The rows of an earlier result, with today's plan."""
    if not file.is_file():
        return []
    rows = json.loads(file.read_text("utf-8"))["rows"]
    return [{**row, "plan": planned(row["parameters"], SHAPES[row["model"]], settings(row["ranks"]))} for row in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small model: does it still run?")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[8, 64])
    parser.add_argument("--layers", type=int, help="cut the models to this many layers: seconds, not minutes")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    if chosen.layers and chosen.out:
        parser.error("--out: the pages are about whole models; leave out --layers")
    shapes = {"small": SMALL} if chosen.smoke else {name: SHAPES[name] for name in chosen.models}
    if chosen.layers:
        shapes = {name: {**shape, "num_hidden_layers": chosen.layers} for name, shape in shapes.items()}
    facts, rows = machine(), [] if chosen.out is None else kept(chosen.out.with_suffix(".json"))
    for name, shape in shapes.items():
        for num in chosen.ranks:
            rows = [row for row in rows if (row["model"], row["ranks"]) != (name, num)]
            rows.append({"model": name, "ranks": num, **measured(shape, num), "commit": facts["commit"]})
            say(f"{name} on {num} ranks: {rows[-1]}")
    rows.sort(key=lambda row: ([*SHAPES, "small"].index(row["model"]), row["ranks"]))
    conclude("sharding", {"rows": rows}, facts, chosen.out, report(rows, facts))


if __name__ == "__main__":
    main()
