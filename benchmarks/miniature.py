"""Simulates a week of a cluster: replicas on nodes that leave and return during a thousand steps.

    .venv/bin/python benchmarks/miniature.py [--smoke] [--steps N] [--seed N] [--out docs/results/miniature]

64 replicas (48 of the rollout, 16 of a reward model) are on eight nodes of a simulated cluster
(`miniature_cluster.py`). The plan, dispatch, restarts, weights, rewards and records are those of every run. There are
two runs, one with nodes that stay and one with nodes that leave. Each must record every prompt and sample once. Their
metrics, trajectories and last checkpoints must be equal bit for bit. Prints one JSON line.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import miniature_cluster
from measure import conclude, machine, made_by, resident_bytes, say

from rlcore import train
from rlcore.cluster import replica
from rlcore.report.metrics import read_trajectories
from rlcore.testing.runs import differing, run_settings

PROMPTS, GROUP = 24, 4
STEADY_S = 0.1
"""Seconds of service after which deaths are forgotten. Here a node stays for seconds; elsewhere it is ten minutes."""


def settings(directory: Path, name: str, steps: int, replicas: tuple[int, int], **nodes: Any) -> dict[str, Any]:
    """The overrides of a run with `replicas` of (rollout, reward model)."""
    model = {"path": "none", "backend": "marker", "replicas": replicas[1], "pool": "main"}
    reward = {"kind": "model", "served_by": "marker", "weight": 0.5}
    return {
        **run_settings(directory, 4 * PROMPTS),
        "rollout.backend": "null_replica",
        "rollout.replicas": replicas[0],
        "rollout.samples_per_prompt": GROUP,
        "plugins.null.token_s": 0.002,
        "plugins.reward_loop.models.marker": model,
        "plugins.reward_loop.rewards.marked": reward,
        "train.name": name,
        "train.max_steps": steps,
        "train.prompts_per_step": PROMPTS,
        "train.log_completions_every": 0,
        "checkpoint.every_steps": max(2, steps // 10),
        **{f"plugins.miniature_cluster.{key}": value for key, value in nodes.items()},
    }


def accounts(run_dir: Path, steps: int) -> dict[str, int]:
    """The numbers of recorded samples, of those recorded more than once, and of those that failed."""
    found: Counter[tuple[Any, ...]] = Counter()
    failed = 0
    for step in range(1, steps + 1):
        for row in read_trajectories(run_dir, step):
            found[step, *row["id"].values()] += 1
            failed += row["status"] != "ok"
    return {"samples": len(found), "twice": sum(count > 1 for count in found.values()), "failed": failed}


def run(directory: Path, name: str, steps: int, replicas: tuple[int, int], **nodes: Any) -> float:
    """Seconds of the run."""
    say(f"{name}: {steps} steps on {sum(replicas)} replicas")
    began = time.perf_counter()
    plugins = ["null", "reward_loop", miniature_cluster.__file__]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        train(settings(directory, name, steps, replicas, **nodes), plugins=plugins)
    return time.perf_counter() - began


def report(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lost, account = result["departures"], result["account"]
    rows = {
        "steps; prompts and samples of a step": f"{result['steps']}; {PROMPTS}; {PROMPTS * GROUP}",
        "nodes that left": lost["departures"],
        "replicas lost with them": lost["replicas_lost"],
        "times that no node was there": lost["all_away"],
        "samples recorded": account["samples"],
        "samples missing, recorded twice, failed": f"{result['missing']}, {account['twice']}, {account['failed']}",
        "differences from the run whose nodes stay": len(result["differences"]),
        "seconds of the run, and of the one whose nodes stay": f"{result['seconds']:.0f}, {result['calm_seconds']:.0f}",
        "resident memory before and after, MiB": " and ".join(f"{it / 2**20:.0f}" for it in result["resident_bytes"]),
    }
    return "\n".join(
        [
            "# A cluster in miniature",
            "",
            made_by("benchmarks/miniature.py", facts),
            "",
            f"{sum(result['replicas'])} replicas ({result['replicas'][0]} of the rollout, {result['replicas'][1]} of a "
            "reward model) on eight nodes that leave",
            "and come back. Nodes and processes are made up; plan, dispatch, restarts, weights, rewards and records",
            "are those of every run. Compared are metrics, trajectories and the last checkpoint, bit for bit.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows.items()),
            "",
            f"Nothing lost, nothing stuck, nothing different: {'yes' if result['holds'] else 'NO'}.",
        ]
    ) + ("\n" if not result["differences"] else "\n\n" + "\n".join(result["differences"][:20]) + "\n")


def measured(directory: Path, steps: int, replicas: tuple[int, int], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Both runs, and their results."""
    calm_seconds = run(directory, "calm", steps, replicas)
    before = resident_bytes()
    seconds = run(directory, "stormy", steps, replicas, **nodes)
    calm, stormy = (directory / "runs" / name for name in ("calm", "stormy"))
    account, differences = accounts(stormy, steps), differing(calm, stormy)
    missing = steps * PROMPTS * GROUP - account["samples"]
    return {
        "replicas": replicas,
        "steps": steps,
        "departures": json.loads((stormy / "departures.json").read_text()),
        "account": account,
        "missing": missing,
        "differences": differences,
        "seconds": seconds,
        "calm_seconds": calm_seconds,
        "resident_bytes": [before, resident_bytes()],
        "holds": not (missing or account["twice"] or account["failed"] or differences),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps and replicas: does it still run?")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    replicas, steps = ((6, 2), 12) if chosen.smoke else ((48, 16), chosen.steps)
    # Two departures within one retry fail a sample of the reward model, by contract; a slow machine needs them rarer.
    nodes = {"stays_s": 0.4 if chosen.smoke else 1.0, "away_s": 0.3 if chosen.smoke else 1.5, "seed": chosen.seed}
    replica.STEADY_S = STEADY_S
    with tempfile.TemporaryDirectory(prefix="miniature-") as scratch:
        result = measured(Path(scratch), steps, replicas, nodes)
    say(f"{result['departures']['departures']} departures, holds: {result['holds']}")
    facts = machine()
    conclude("miniature", result, facts, chosen.out, report(result, facts))


if __name__ == "__main__":
    main()
