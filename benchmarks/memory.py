"""Compares the peak memory of an update with the plan's estimate, at one and four times the batch.

    .venv/bin/python benchmarks/memory.py [--trl-bytes 5.5e9 ...] [--smoke]

Each batch has a separate process, so that no peak hides another. It takes two steps: in the first one Adam's moments
are allocated after the backward pass, in every later one they exist during it. Prints one JSON line. `--trl-bytes` are
TRL's peaks for the same batches, as `vs_trl.py` prints them ('peak_rss_bytes'), for comparison. See
docs/performance.md.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import vs_trl
from measure import MODEL, emit, machine, peak_rss_of_tree, say, summary
from scenarios import SCENARIOS, sized
from tiny_task import write_tiny_task

TIMES = (1, 4)
STEPS = 2
TOLERANCE = 0.15


def measured(options: argparse.Namespace, model: Path, directory: Path, times: int) -> dict[str, Any]:
    """The peak of `STEPS` steps with `times` times as many prompts, and the plan's estimate of it."""
    scenario = sized(SCENARIOS["E1"], options)
    scenario = replace(scenario, prompts=scenario.prompts * times)
    comparison = vs_trl.Comparison(scenario, model, options, directory)
    with comparison.ours() as ours:
        facts = comparison.ready(ours)
        peaks, steps = [peak_rss_of_tree(ours.pid)], []
        for _ in range(STEPS):
            steps.append(comparison.step(ours))
            peaks.append(peak_rss_of_tree(ours.pid))
    started, peak = peaks[0], peaks[-1]
    planned = sum(facts["memory_bytes"].values()) or None
    say(f"{times} x the batch: {peak / 1e9:.2f} GB, planned {0 if planned is None else planned / 1e9:.2f} GB")
    return {
        "rows": scenario.rows,
        "peak_rss_bytes": peak,
        "after_start_rss_bytes": started,
        "peak_rss_bytes_by_step": peaks[1:],
        "step_s": summary([step["step_s"] for step in steps]),
        "gemm_peak_gflops": comparison.gemm_peak(),
        "planned_bytes": planned,
        "planned_by_what": facts["memory_bytes"],
        "measured_over_planned": None if planned is None else peak / planned,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-bytes", type=float, nargs="*", default=[], help="TRL's peaks at 1 and 4 times the batch")
    parser.add_argument("--ours", action="append", default=[], metavar="KEY=VALUE", help="an override of our config")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and tiny sizes: does it still run?")
    options = parser.parse_args(arguments)
    for name, value in {"prompts": 0, "samples": 0, "new_tokens": 0, "dtype": "float32", "device": "cpu"}.items():
        setattr(options, name, value)
    results = {}
    for times in TIMES:
        with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
            directory = Path(scratch)
            model = write_tiny_task(directory / "tiny") if options.smoke else options.model
            results[times] = measured(options, model, directory, times)
    ratios = {
        times: result["peak_rss_bytes"] / theirs
        for (times, result), theirs in zip(results.items(), options.trl_bytes, strict=False)
    }
    within = [
        result["measured_over_planned"] for result in results.values() if result["measured_over_planned"] is not None
    ]
    emit(
        "memory",
        {
            "batches": results,
            "of_trl": ratios,
            "gemm_peak_gflops": summary([result["gemm_peak_gflops"] for result in results.values()]),
            "plan_is_within_15_percent": bool(within) and all(abs(ratio - 1) <= TOLERANCE for ratio in within),
        },
        machine(options.threads),
    )


if __name__ == "__main__":
    main()
