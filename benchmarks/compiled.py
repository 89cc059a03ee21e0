"""Updates with compiled layers (`actor.compile`) and with torch's own, in turns.

    .venv/bin/python benchmarks/compiled.py [--device cuda] [--dtype bfloat16] [--model DIRECTORY] [--rounds 5]

The batch is one group whose samples share their prompt. The result has the seconds of the first update, which compiles,
the medians of the others with their ratio, and the largest difference of log-probs. Prints one JSON line on stdout.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import MODEL, emit, machine, say, summary
from tiny_task import write_tiny_task

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.compiled import CompiledLayers
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.testing.tiny import batch_of_rows
from rlcore.types import Batch, SharedPrefix


def group(samples: int, prompt: int, length: int) -> Batch:
    """Rows that begin alike and then differ."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 256, prompt).tolist()
    return batch_of_rows([[[*start, *rng.integers(0, 256, length).tolist()] for _ in range(samples)]])


def measured(model: Path, device: str, dtype: str, batch: Batch, rounds: int, backend: str) -> dict[str, Any]:
    """Seconds of updates of both ways on this batch. `backend`: torch.compile's."""
    engines = {way: _engine(model, device, dtype, batch) for way in ("eager", "compiled")}
    engines["compiled"].model.compiled = CompiledLayers(engines["compiled"].model.transformer, backend)
    apart = float(np.abs(engines["eager"].logprobs(batch) - engines["compiled"].logprobs(batch)).max())
    first = {way: _seconds(engine, batch) for way, engine in engines.items()}
    times: dict[str, list[float]] = {way: [] for way in engines}
    for index in range(rounds):
        for way, engine in engines.items():
            times[way].append(_seconds(engine, batch))
            say(f"compiled: update {index + 1}, {way}: {times[way][-1]:.3f} s")
    medians = {way: summary(found) for way, found in times.items()}
    ratio = medians["eager"]["median"] / medians["compiled"]["median"]
    return {"first_s": first, "update_s": medians, "ratio": ratio, "logprob_abs_max": apart}


def _engine(model: Path, device: str, dtype: str, batch: Batch) -> TrainEngine:
    tokens = int(batch.tokens.token_ids_BT.size)
    settings = EngineConfig(dtype=dtype, gradient_checkpointing=device == "cuda", micro_batch_tokens=tokens)
    loss, where = PolicyLoss(clip, AlgoConfig()), ModelConfig(path=str(model), attention="sdpa")
    engine = TrainEngine("causal_lm", where, settings, loss, device=device, shared_prefix=SharedPrefix.TREE)
    engine.begin_updates()  # keeps the allocator's cache from one update to the next, as the updates of a step do
    return engine


def _seconds(engine: TrainEngine, batch: Batch) -> float:
    began = time.perf_counter()
    engine.update(batch)  # waits for the device: it returns metrics
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one device and number format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=45)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny random model, and a compiler that generates no code"
    )
    own = parser.parse_args(arguments)
    torch.set_num_threads(own.threads)
    with tempfile.TemporaryDirectory(prefix="compiled-") as scratch:
        model = write_tiny_task(Path(scratch) / "tiny") if own.smoke else own.model
        batch = group(own.samples, own.prompt, own.length)
        backend, rounds = ("aot_eager", 1) if own.smoke else ("inductor", own.rounds)
        result = measured(model, own.device, own.dtype, batch, rounds, backend)
    sizes = {name: getattr(own, name) for name in ("device", "dtype", "samples", "prompt", "length")}
    emit("compiled", {**sizes, **result}, machine(own.threads))


if __name__ == "__main__":
    main()
