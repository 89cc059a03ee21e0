"""Measures moving batches and weights: bytes per second and copies, by kind of worker.

    .venv/bin/python benchmarks/transfer.py [--smoke] [--ray] [--model DIR] [--out docs/results/transfer]

Batches: a worker returns its argument, an array. A thread of the driver gets it without a copy, a child process through
shared memory, an actor of Ray through its object store. The result has the seconds of an empty call and, for arrays of
1, 10 and 100 MB:

* the seconds of a round trip, and the bytes per second, where both directions count;
* true if the returned array is a copy;
* the most copies that the driver held at once: its additional peak of resident memory, in sizes of the array.

Weights, with --model: the weight sync after a step, as in a run. The embedded rollout samples from the actor's own
weights. A replica with a separate copy reads files that the actor writes into memory (`rollout.weights_dir` in
/dev/shm), or gets the weights from the actor's process (`rollout.weight_sync=tcp`). The result has the seconds of the
whole, those of the replica's reading, and the bytes. In one command: `make results-transfer`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from echoing import READ
from measure import conclude, machine, made_by, peak_rss_bytes, reset_peak_rss, resident_bytes, say, summary

from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

HERE = Path(__file__).resolve().parent
PLUGINS = ("null", str(HERE / "echoing.py"))
MEGABYTES = (1, 10, 100)
KINDS = {"local": {"here": "thread", "apart": "process"}, "ray": {"here": "actor"}}


async def measured(replica: Any, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Round trips of arrays of these megabytes, and of an empty call."""
    echo = sys.modules["rlcore_file_echoing"].Echo.echo
    found: dict[str, Any] = {"call_s": summary([await _trip(replica, echo, None) for _ in range(10 * rounds)])}
    for size in sizes:
        value = np.ones(size * 1_000_000, np.uint8)
        await _trip(replica, echo, value)
        seconds = summary([await _trip(replica, echo, value) for _ in range(rounds)])
        before = resident_bytes()
        resettable = reset_peak_rss()
        copied = not np.shares_memory(value, await replica.call(echo, value))
        held = (peak_rss_bytes() - before) / value.nbytes if resettable else None
        found[f"{size}_MB"] = {
            "s": seconds,
            "bytes_per_s": 2 * value.nbytes / seconds["median"],
            "copied": copied,
            "copies_in_driver": held,
        }
    return found


async def _trip(replica: Any, echo: Any, value: Any) -> float:
    began = time.perf_counter()
    returned = await replica.call(echo, value)
    seconds = time.perf_counter() - began
    if value is not None and returned.shape != value.shape:
        raise ValueError("the worker returned something else")
    return seconds


def of_cluster(backend: str) -> list[str]:
    """Overrides that choose a cluster."""
    return ["plugins.ray.object_store_gib=1"] if backend == "ray" else []


async def batches(backend: str, directory: Path, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Round trips by each kind of worker of a cluster."""
    plan = plan_run([], [*SETTINGS, "rollout.agent=echoing", *of_cluster(backend)], PLUGINS)
    cluster = plan.cluster.offer.cls(cluster_context(plan, directory, Deadlines()))
    kinds = KINDS[backend]
    try:
        await cluster.open()
        found = {}
        for worker in plan.workers:
            if worker.request.role.name in kinds:
                kind = kinds[worker.request.role.name]
                group = await cluster.start(worker)
                found[kind] = await measured(group.replicas[0], sizes, rounds)
                say(f"batches, {kind}: done")
        return found
    finally:
        await cluster.close()


async def weights(backend: str, rollout: str, model: Path, directory: Path, rounds: int) -> dict[str, Any]:
    """Weight syncs from an actor on transformers to its embedded rollout, or to a replica with a separate copy."""
    replica = rollout != "embedded"
    run_dir, files = directory / f"{backend}-{rollout}", directory / "weights"
    sent = ["rollout.weight_sync=tcp"] if rollout == "tcp" else [f"rollout.weights_dir={files}"]
    run_dir.mkdir()
    settings = [
        *(setting for setting in SETTINGS if not setting.startswith(("model.", "data.", "actor.", "rollout."))),
        f"model.path={model}",
        f"data.sources.all.path={write_prompts(directory / 'prompts.jsonl', 8)}",
        f"rollout.backend={'reader' if replica else 'hf'}",
        "rollout.check_weights_every=0",
        *(sent if replica else []),
        *of_cluster(backend),
    ]
    seconds, read = [], []
    async with launch(plan_run([], settings, PLUGINS if replica else PLUGINS[:1]), run_dir) as run:
        for version in range(1, rounds + 2):
            began = time.perf_counter()
            await run.publish(version)
            seconds.append(time.perf_counter() - began)
            read.append(json.loads((run_dir / READ).read_text()) if replica else {"s": 0.0, "bytes": 0})
    say(f"weights, {backend}, {rollout}: done")
    num_bytes = read[-1]["bytes"]
    return {
        "s": summary(seconds[1:]),
        "read_s": summary([duration["s"] for duration in read[1:]]),
        "bytes": num_bytes,
        "bytes_per_s": num_bytes / summary(seconds[1:])["median"],
    }


def report(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "# The cost of moving data",
        "",
        made_by("benchmarks/transfer.py", facts),
        "",
        "## Batches: an array to a worker and back",
        "",
        "| worker | call with nothing, ms | array | ms | MB/s | is a copy | copies in the driver at once |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, found in result["batches"].items():
        for size, figures in ((size, figures) for size, figures in found.items() if size != "call_s"):
            held = "-" if figures["copies_in_driver"] is None else f"{figures['copies_in_driver']:.1f}"
            lines.append(
                f"| {kind} | {1e3 * found['call_s']['median']:.2f} | {size.replace('_', ' ')} | "
                f"{1e3 * figures['s']['median']:.1f} | {figures['bytes_per_s'] / 1e6:.0f} | "
                f"{'yes' if figures['copied'] else 'no'} | {held} |"
            )
    if result["weights"]:
        lines += [
            "",
            "## Weights: the hand-over after a step",
            "",
            "| cluster | rollout | MB | s | of these reading | MB/s |",
            "|---|---|---|---|---|---|",
        ]
    for name, weight in result["weights"].items():
        cluster, rollout = name.split(" ")
        lines.append(
            f"| {cluster} | {rollout} | {weight['bytes'] / 1e6:.0f} | {weight['s']['median']:.4f} | "
            f"{weight['read_s']['median']:.4f} | {weight['bytes_per_s'] / 1e6:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one size, few rounds: does it still run?")
    parser.add_argument("--ray", action="store_true", help="also on Ray, which is started here")
    parser.add_argument("--model", type=Path, help="also weights: those of this model directory, through /dev/shm")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    sizes, rounds = (MEGABYTES[:1], 2) if chosen.smoke else (MEGABYTES, 7)
    clusters = ("local", "ray") if chosen.ray else ("local",)
    result: dict[str, Any] = {"batches": {}, "weights": {}}
    with tempfile.TemporaryDirectory(prefix="transfer-", dir="/dev/shm") as scratch:
        for backend in clusters:
            result["batches"] |= asyncio.run(batches(backend, Path(scratch), sizes, rounds))
        for backend in clusters if chosen.model else ():
            for rollout in ("embedded", "disk", "tcp"):
                handed = weights(backend, rollout, chosen.model.resolve(), Path(scratch), rounds)
                result["weights"][f"{backend} {rollout}"] = asyncio.run(handed)
    facts = machine()
    conclude("transfer", result, facts, chosen.out, report(result, facts))


if __name__ == "__main__":
    main()
