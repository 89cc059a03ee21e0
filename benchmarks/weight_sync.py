"""Measures a weight sync with each value of `rollout.weight_sync`, on one machine.

    .venv/bin/python benchmarks/weight_sync.py --model DIR [--smoke] [--replicas 2] [--out docs/results/weight_sync]

An actor on transformers sends all its weights to replicas that read every number and keep none. Each method is a run,
and all runs are open at once. In every round, each run syncs one version, one after another, so other load on the
machine affects all of them equally. Seconds are medians; the ratio is that of the medians to `disk` in /dev/shm. The
page extrapolates to 7B and 32B in bfloat16 by bytes. In one command: `make results-weight-sync`.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from echoing import READ
from measure import conclude, machine, made_by, say, summary

from rlcore.contracts.actor import ActorWorker
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.testing.tiny import write_tiny_model

PLUGINS = ("null", str(Path(__file__).resolve().parent / "echoing.py"))
WAYS = ("memory", "disk", "tcp", "shm", "gloo", "ipc")
"""The methods. memory: `disk` with `rollout.weights_dir` in /dev/shm; gloo: `nccl` with gloo as its transport."""
LARGE_BYTES, LARGER_BYTES = 15.2e9, 65.5e9
"""Bytes of 7B and 32B parameters in bfloat16."""


def settings(way: str, model: Path, replicas: int, scratch: Path, memory: Path) -> list[str]:
    """Overrides of a run with this method."""
    sync = {
        "memory": [f"rollout.weights_dir={memory}"],
        "disk": [f"rollout.weights_dir={scratch}"],
        "tcp": ["rollout.weight_sync=tcp"],
        "shm": ["rollout.weight_sync=shm"],
        "gloo": ["rollout.weight_sync=nccl", "rollout.weights_transport=gloo", "rollout.weights_bucket_mib=16"],
        "ipc": [
            "rollout.weight_sync=ipc",
            "rollout.weights_bucket_mib=16",
            "rollout.pool=main",  # for replicas on the actor's devices
            "cluster.train_pool=train",
            "cluster.pools.train.colocates=[main]",
        ],
    }
    return [
        *(setting for setting in SETTINGS if not setting.startswith(("model.", "data.", "actor.", "rollout."))),
        f"model.path={model}",
        "model.tokenizer=bytes",  # the run does not sample
        f"data.sources.all.path={write_prompts(scratch / f'{way}.jsonl', 8)}",
        "rollout.backend=reader",
        "rollout.check_weights_every=0",
        f"rollout.replicas={replicas}",
        *sync[way],
    ]


async def measured(model: Path, replicas: int, rounds: int, scratch: Path, memory: Path) -> dict[str, Any]:
    """Weight syncs by every method, in turns."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    num_bytes = 0
    async with AsyncExitStack() as stack:
        runs = {}
        for way in WAYS:
            run_dir = scratch / way
            run_dir.mkdir()
            plan = plan_run([], settings(way, model, replicas, scratch, memory), PLUGINS)
            runs[way] = await stack.enter_async_context(launch(plan, run_dir))
            say(f"{way}: launched")
        for version in range(1, rounds + 2):
            for way, run in runs.items():
                await run.actor.replicas[0].call(ActorWorker.publish, version)
                began = time.perf_counter()
                await run.sync_weights(version)
                seconds[way].append(time.perf_counter() - began)
                num_bytes = json.loads((run.run_dir / READ).read_text())["bytes"]
            say(f"version {version}: " + ", ".join(f"{way} {times[-1]:.3f} s" for way, times in seconds.items()))
    ways = {way: summary(times[1:]) for way, times in seconds.items()}
    base = ways["memory"]["median"]
    return {
        "bytes": num_bytes,
        "replicas": replicas,
        "rounds": rounds,
        "ways": {
            way: {
                "s": found,
                "ratio": found["median"] / base,
                "large_s": found["median"] * LARGE_BYTES / num_bytes,
                "larger_s": found["median"] * LARGER_BYTES / num_bytes,
            }
            for way, found in ways.items()
        },
    }


NAMES = {
    "memory": "`disk`, `weights_dir` in /dev/shm",
    "disk": "`disk`, a directory below /tmp",
    "tcp": "`tcp`",
    "shm": "`shm`",
    "gloo": "`nccl`, `weights_transport` gloo",
    "ipc": "`ipc`, buckets in the host's memory",
}


def report(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["# Seconds of a hand-over of weights", "", made_by("benchmarks/weight_sync.py", facts), ""]
    lines += [
        f"{result['runs'][0]['rounds']} versions by each way, in turns. Seconds are medians (and extremes) of the",
        "whole hand-over: copying the weights from the actor, and reading every number in all replicas. The ratio is",
        "that of medians. 7B and 32B: the same seconds per byte for",
        f"{LARGE_BYTES / 1e9:g} and {LARGER_BYTES / 1e9:g} GB, an arithmetic and not a measurement. All ways but",
        "`disk` and `ipc` begin with a copy in host memory. `nccl` and `ipc` on GPUs are not measured.",
        "",
    ]
    if facts["load_average"][0] > facts["cores"]:
        lines += ["Other work had more than all cores: seconds are several times those of an idle machine.", ""]
    for run in result["runs"]:
        lines += [
            f"## {run['bytes'] / 1e6:.0f} MB to {run['replicas']} replica{'s' if run['replicas'] > 1 else ''}",
            "",
            "| `rollout.weight_sync` | s | GB/s to each | ratio | 7B, s | 32B, s |",
            "|---|---|---|---|---|---|",
        ]
        for way, found in run["ways"].items():
            times = found["s"]
            spread = f"{times['median']:.3f} ({times['min']:.3f} to {times['max']:.3f})"
            speed = run["bytes"] / 1e9 / times["median"]
            large = f"{found['large_s']:.0f} | {found['larger_s']:.0f}"
            lines.append(f"| {NAMES[way]} | {spread} | {speed:.2f} | {found['ratio']:.2f} | {large} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and two rounds: does it still run?")
    parser.add_argument("--model", type=Path, help="hand over the weights of this model directory")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2], help="numbers of replicas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    if not chosen.smoke and chosen.model is None:
        sys.exit("weight_sync: no --model; needs a model directory, or --smoke")
    runs = []
    for replicas in chosen.replicas:
        with (
            tempfile.TemporaryDirectory(prefix="weight-sync-") as scratch,
            tempfile.TemporaryDirectory(prefix="weight-sync-", dir="/dev/shm") as memory,
        ):
            model = chosen.model.resolve() if chosen.model else write_tiny_model(Path(scratch) / "tiny")
            rounds = 2 if chosen.smoke else chosen.rounds
            runs.append(asyncio.run(measured(model, replicas, rounds, Path(scratch), Path(memory))))
    facts, result = machine(), {"runs": runs}
    conclude("weight_sync", result, facts, chosen.out, report(result, facts))


if __name__ == "__main__":
    main()
