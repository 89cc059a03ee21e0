"""Measures the sending of batches to eight ranks: seconds of the controller's loop, and bytes.

    .venv/bin/python benchmarks/batches.py [--smoke] [--pipe] [--out docs/results/batches]

The ranks are processes of this machine that receive a batch, read rows of it and compute nothing. A step has two
passes, of the reference and of the old policy, and one update. A pass sends 10 bytes per position and returns 4; an
update sends 22 bytes per position and returns nothing. The result has for each call:

* the seconds until its answer,
* the seconds of computing on the controller's loop,
* the longest time in which the loop served nothing else,
* the bytes that the controller wrote and read.

--pipe also measures without shared memory: each rank gets the whole batch through a pipe, which takes 12 GB of memory
at 512 rows.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import conclude, machine, made_by, say, summary
from receiving import PIPE

from rlcore.cluster import shared_arrays
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS
from rlcore.types import Batch, TokenArrays

HERE = Path(__file__).resolve().parent
PLUGINS = ("null", str(HERE / "receiving.py"))
TICK_S = 0.002
PASSES_PER_STEP = 2
EXPLAINED = (
    "A step has two passes and one update of all rows. `s of the loop`: processor time of the controller's thread that",
    "serves agents and rewards. `longest stall`: seconds for which that thread served nothing else. Written and read",
    "are the bytes of the controller's system calls. With shared memory a batch is written once for all ranks, in",
    "another thread, and read by mapping it.",
)


def batch_of(num_rows: int, num_tokens: int, seed: int = 0) -> Batch:
    """Rows of `num_tokens` tokens, the second half of them sampled; 16 samples per prompt."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, num_tokens)
    loss_mask_BT = np.zeros(shape, dtype=np.bool_)
    loss_mask_BT[:, num_tokens // 2 :] = True
    tokens = TokenArrays(
        rng.integers(0, 150_000, shape, dtype=np.int32),
        np.ones(shape, dtype=np.bool_),
        loss_mask_BT,
        np.where(loss_mask_BT, np.float32(-1.0), np.float32(0.0)),
    )
    return Batch(
        tokens=tokens,
        sample_B=np.arange(num_rows),
        group_B=np.arange(num_rows) // 16,
        lengths_B=np.full(num_rows, num_tokens),
        num_sampled_B=np.full(num_rows, num_tokens - num_tokens // 2),
        prompt_lengths_B=np.full(num_rows, num_tokens // 2),
        rewards_B=np.zeros(num_rows, dtype=np.float32),
    )


def filled(batch: Batch) -> Batch:
    """The batch as an update gets it: with weights, advantages per token, and log-probs of two policies."""
    filler_BT = np.full(batch.tokens.token_ids_BT.shape, -0.5, dtype=np.float32)
    return replace(
        batch,
        weights_B=np.ones(len(batch), dtype=np.float32),
        advantages_BT=filler_BT,
        old_logprobs_BT=filler_BT.copy(),
        reference_logprobs_BT=filler_BT.copy(),
    )


async def ticking(gaps: list[float]) -> None:
    """Records the delay of each turn of the loop."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_S)
        gaps.append(time.perf_counter() - began - TICK_S)


def io_bytes() -> tuple[int, int]:
    """Bytes that this process has written and read with system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"]), int(fields["rchar"])


async def measured(replica: Any, method: Any, batch: Batch, rounds: int) -> dict[str, Any]:
    """Calls of the method with the batch; the first is not counted."""
    seconds, loop_s, stalls = [], [], []
    await replica.call(method, batch)
    before = io_bytes()
    for _ in range(rounds):
        gaps: list[float] = []
        ticks = asyncio.create_task(ticking(gaps))
        await asyncio.sleep(2 * TICK_S)
        computed, began = time.thread_time(), time.perf_counter()
        await replica.call(method, batch)
        seconds.append(time.perf_counter() - began)
        loop_s.append(time.thread_time() - computed)
        await asyncio.sleep(2 * TICK_S)
        ticks.cancel()
        stalls.append(max(gaps, default=0.0))
    written, read = ((after - start) / rounds for after, start in zip(io_bytes(), before, strict=True))
    return {
        "s": summary(seconds),
        "loop_s": summary(loop_s),
        "longest_stall_s": summary(stalls),
        "bytes_written": written,
        "bytes_read": read,
    }


@contextmanager
def pipe_only(on: bool) -> Iterator[None]:
    """With `on`, neither this process nor workers that start in the block share memory."""
    before = shared_arrays.MIN_SHARED_BYTES
    if on:
        shared_arrays.MIN_SHARED_BYTES = 1 << 62
        os.environ[PIPE] = "1"
    try:
        yield
    finally:
        shared_arrays.MIN_SHARED_BYTES = before
        os.environ.pop(PIPE, None)


async def measure(num_rows: int, num_tokens: int, rounds: int, directory: Path) -> dict[str, Any]:
    """A pass and an update."""
    plan = plan_run([], [*SETTINGS, "rollout.agent=receiving"], PLUGINS)
    cluster = plan.cluster.offer.cls(cluster_context(plan, directory, Deadlines()))
    found: dict[str, Any] = {"rows": num_rows, "tokens": num_tokens}
    try:
        await cluster.open()
        worker = next(worker for worker in plan.workers if worker.request.role.name == "ranks")
        replica = (await cluster.start(worker)).replicas[0]
        receiver = sys.modules["rlcore_file_receiving"].Receiver
        batch = batch_of(num_rows, num_tokens)
        found["pass"] = await measured(replica, receiver.logprobs, batch, rounds)
        say(f"{num_rows} x {num_tokens}, pass: done")
        found["update"] = await measured(replica, receiver.update, filled(batch), rounds)
        say(f"{num_rows} x {num_tokens}, update: done")
        return found
    finally:
        await cluster.close()


def report(results: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Batches to eight ranks",
        "",
        made_by("benchmarks/batches.py", facts),
        "",
        "| way | rows x tokens | call | s | s of the loop | longest stall, s | GB written | GB read |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in results:
        for call in ("pass", "update"):
            figures = found[call]
            lines.append(
                f"| {found['way']} | {found['rows']} x {found['tokens']} | {call} | {figures['s']['median']:.3f} | "
                f"{figures['loop_s']['median']:.3f} | {figures['longest_stall_s']['median']:.3f} | "
                f"{figures['bytes_written'] / 1e9:.3f} | {figures['bytes_read'] / 1e9:.3f} |"
            )
        step_s = PASSES_PER_STEP * found["pass"]["loop_s"]["median"] + found["update"]["loop_s"]["median"]
        lines.append(f"| {found['way']} | {found['rows']} x {found['tokens']} | step | | {step_s:.3f} | | | |")
    return "\n".join([*lines, "", *EXPLAINED]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few rows, few rounds: does it still run?")
    parser.add_argument("--pipe", action="store_true", help="also without shared memory")
    parser.add_argument("--rows", type=int, nargs="*", help="rows of the batches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    sizes = [(32, 128)] if chosen.smoke else [(rows, 33_000) for rows in chosen.rows or (64, 512)]
    results = []
    with tempfile.TemporaryDirectory(prefix="batches-") as scratch:
        for way in ("pipe", "shared memory") if chosen.pipe else ("shared memory",):
            for rows, tokens in sizes:
                with pipe_only(way == "pipe"):
                    found = asyncio.run(measure(rows, tokens, 1 if chosen.smoke else chosen.rounds, Path(scratch)))
                results.append({"way": way, **found})
    facts = machine()
    conclude("batches", {"sizes": results}, facts, chosen.out, report(results, facts))


if __name__ == "__main__":
    main()
