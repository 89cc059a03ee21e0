"""The measurements of `gpu_check.py`, each in a separate process: a failed or late part does not affect the others.

    .venv/bin/python benchmarks/gpu_parts.py attention '{"model": ..., "device": "cuda", ...}'

Prints one JSON line. Memory is in bytes: for a device as its driver reports it, for a CPU resident memory.
"""

import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live import live
from measure import peak_rss_bytes, reset_peak_rss, resident_bytes

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.plan import activations
from rlcore.report.metrics import read
from rlcore.runtime.gpus import find_gpus
from rlcore.types import SharedPrefix

HERE = Path(__file__).resolve().parent
SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
}
"""Shapes of Qwen2.5, with two key heads; the tiny one is for tests of this program."""
SAMPLE_S = 0.1
"""Seconds between two samples of the memory."""


def write_shape(directory: Path, name: str, **settings: int) -> Path:
    """Write a model of this shape with random weights; returns the directory."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    vocabulary = 264 if name == "tiny" else 151_936
    config = Qwen2Config(
        **{**SHAPES[name], **settings},
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if name == "tiny" else torch.bfloat16
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    return directory


def attention(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak memory and seconds of an update of two layers, by length of a response and method of sharing the prompt."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shape(Path(scratch) / "model", spec["shape"], num_hidden_layers=2)
        for way in spec["ways"]:
            for length in spec["lengths"]:
                engine = _engine(spec, model, way, spec["samples"] * (spec["prompt"] + length))
                batch = _rows_of_a_group(spec["samples"], spec["prompt"], length)
                engine.update(batch)  # compiled kernels and workspaces
                with _peak(spec["device"]) as peak:
                    began = time.perf_counter()
                    engine.update(batch)
                    seconds = time.perf_counter() - began
                rows.append({"way": way, "length": length, "peak_bytes": peak["bytes"], "s": seconds})
                del engine
    return {"rows": rows}


def head_chunks(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of an update of one layer, by the number of rows of logits per chunk."""
    found = {}
    before = activations.DEVICE_ROWS
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shape(Path(scratch) / "model", spec["shape"], num_hidden_layers=1)
        engine = _engine(spec, model, "tree", spec["samples"] * (spec["prompt"] + spec["length"]))
        batch = _rows_of_a_group(spec["samples"], spec["prompt"], spec["length"])
        for rows in spec["rows"]:
            activations.DEVICE_ROWS = (rows, rows)
            engine.update(batch)
            began = time.perf_counter()
            engine.update(batch)
            found[str(rows)] = time.perf_counter() - began
    activations.DEVICE_ROWS = before
    return {"seconds": found}


def runs(spec: dict[str, Any]) -> dict[str, Any]:
    """Steps of a real run, by rows at a time: times, tokens per second, differences of log-probs between sampler and
    trainer, planned memory, and memory over time."""
    return {str(rows): asyncio.run(_run(spec | {"rows": rows, "groups": groups_of(rows)})) for rows in spec["rows"]}


def run_settings(spec: dict[str, Any], directory: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """Configuration, overrides and plugins of a run; its prompts are written into the directory."""
    text = "n" * max(1, spec["prompt"] - 40)
    lines = [json.dumps({"prompt": f"{index:04} {text}", "answer": ""}) for index in range(spec["groups"])]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    config: dict[str, Any] = {
        "model": {"path": spec["model"], "tokenizer": "bytes"},
        "data": {
            "sources": {"all": {"path": str(directory / "prompts.jsonl")}},
            "max_prompt_tokens": spec["prompt"],
        },
        "rollout": {"samples_per_prompt": spec["samples"], "max_tokens": spec["length"], "max_rows": spec["rows"]},
        "reward": {"functions": {"letters": {"fn": f"{HERE / 'reward.py'}:letter_share"}}},
        "actor": {"lr": 1e-5, "dtype": spec["dtype"]},
        "cluster": {"device": spec["device"], "threads": spec["threads"]},
        "train": {"prompts_per_step": spec["groups"], "max_steps": 1000},
    }
    overrides = [f"rollout.backend={spec['backend']}", *spec.get("overrides", ())]
    return config, overrides, [spec["backend"]] if spec["backend"] != "hf" else []


def groups_of(rows: int) -> int:
    """Prompts of a step that samples this many rows."""
    return max(1, rows // 16)


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        config, overrides, plugins = run_settings(spec, directory)
        with _timeline(spec["device"]) as timeline:
            async with live(config, overrides, plugins, directory / "run") as trainer:
                plan = trainer.run.plan
                timeline.mark("started")
                for number in range(spec["steps"]):
                    await trainer.step()
                    timeline.mark(f"step {number + 1}")
        steps = [row for row in read(directory / "run") if "time/generate_s" in row]
        tokens = spec["groups"] * spec["samples"] * steps[-1]["completion/length_mean"]
        return {
            "planned_bytes": dict(plan.memory_bytes),
            "planned_on_devices": {pool: dict(phases) for pool, phases in plan.device_bytes.items()},
            "sleeping": list(plan.colocated_roles),
            "choices": {choice.key: choice.value for choice in plan.choices},
            "peak_bytes": timeline.peak,
            "timeline": timeline.points,
            "marks": timeline.marks,
            "tokens_per_s": tokens / steps[-1]["time/generate_s"],
            "logprob_diff": [row.get("policy/rollout_logprob_diff") for row in steps],
            "steps": [{key: value for key, value in row.items() if key.startswith("time/")} for row in steps],
        }


class Timeline:
    """Memory in use over time, as [seconds, bytes]."""

    def __init__(self, used: Callable[[], int]) -> None:
        self.points: list[list[float]] = []
        self.marks: dict[str, float] = {}
        self._used, self._began, self._ended = used, time.perf_counter(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def peak(self) -> float:
        """The largest value."""
        return max((used for _, used in self.points), default=0.0)

    def mark(self, name: str) -> None:
        """Record the end of something."""
        self.marks[name] = time.perf_counter() - self._began

    def close(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.points.append([round(time.perf_counter() - self._began, 2), float(self._used())])


@contextmanager
def _timeline(device: str) -> Iterator[Timeline]:
    timeline = Timeline(_device_used if device == "cuda" else resident_bytes)
    try:
        yield timeline
    finally:
        timeline.close()


def _device_used() -> int:
    gpu = find_gpus().visible[0]
    return (gpu.total or 0) - (gpu.free or 0)


@contextmanager
def _peak(device: str) -> Iterator[dict[str, int]]:
    """The peak memory of the block beyond the memory in use before."""
    import torch

    found = {"bytes": 0}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found["bytes"] = torch.cuda.max_memory_allocated() - before
        return
    reset_peak_rss()
    before = resident_bytes()
    yield found
    found["bytes"] = peak_rss_bytes() - before


def _engine(spec: dict[str, Any], model: Path, way: str, tokens: int) -> Any:
    from rlcore.engines.hf import TrainEngine
    from rlcore.engines.hf.train.policy_loss import PolicyLoss

    settings = EngineConfig(dtype=spec["dtype"], gradient_checkpointing=True, micro_batch_tokens=tokens)
    loss = PolicyLoss(clip, AlgoConfig())
    where = ModelConfig(path=str(model), tokenizer="bytes")
    engine = TrainEngine("causal_lm", where, settings, loss, device=spec["device"], shared_prefix=SharedPrefix(way))
    engine.begin_updates()  # keeps the allocator's cache from one update to the next, as the updates of a step do
    return engine


def _rows_of_a_group(samples: int, prompt: int, length: int) -> Any:
    """Rows that begin alike and then differ."""
    import numpy as np

    from rlcore.testing.tiny import batch_of_rows

    rng = np.random.default_rng(0)
    start = rng.integers(0, 256, prompt).tolist()
    return batch_of_rows([[[*start, *rng.integers(0, 256, length).tolist()] for _ in range(samples)]])


def compiled_layers(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of updates with and without compiled layers."""
    from compiled import group, measured

    batch = group(spec["samples"], spec["prompt"], spec["length"])
    return measured(Path(spec["model"]), spec["device"], spec["dtype"], batch, spec["rounds"], spec["backend"])


PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "attention": attention,
    "compiled": compiled_layers,
    "head_chunks": head_chunks,
    "runs": runs,
}


def main() -> None:
    """Measure the named part, and print its figures."""
    if len(sys.argv) != 3 or sys.argv[1] not in PARTS:
        raise SystemExit(f"gpu_parts: name a part and its JSON; parts: {', '.join(PARTS)}")
    print(json.dumps(PARTS[sys.argv[1]](json.loads(sys.argv[2]))), flush=True)


if __name__ == "__main__":
    main()
