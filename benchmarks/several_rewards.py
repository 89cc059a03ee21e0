"""Trains the tiny task with a second reward of a larger scale, by the sum of both rewards and by each (`gdpo`).

    .venv/bin/python benchmarks/several_rewards.py [--out docs/results/several_rewards] [--smoke]

Task, start, prompts, number of samples, seeds, area and interval are those of `learning_vs_trl.py`. The second reward
is a number from 0 to 10 that depends on the response and has nothing to do with the task; held-out prompts are scored
by the task's reward alone. The sum must learn less than the task's reward alone does, which shows that the second
reward matters here, and `gdpo` must learn more than the sum. Prints one JSON line on stdout.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learning_controls import curves_of_seed, table
from learning_vs_trl import HERE, LIMIT, Task, paired
from measure import conclude, machine

OTHER = f"reward.functions.other.fn={HERE / 'reward.py'}:digest"
RUNS: Mapping[str, tuple[str, ...]] = {
    "alone": (),
    "sum": (OTHER,),
    "gdpo": (OTHER, "algo.advantage=gdpo"),
}
TITLES = {"alone": "GRPO, the task's reward alone", "sum": "GRPO, sum of two rewards", "gdpo": "gdpo, two rewards"}


def judged(curves: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """The differences of areas, and True if the sum learns less than the task's reward alone, and gdpo more than it."""
    by_name = {name: [curve[name] for curve in curves] for name in RUNS}
    differences = {
        "sum - alone": paired(by_name["sum"], by_name["alone"]),
        "gdpo - alone": paired(by_name["gdpo"], by_name["alone"]),
        "gdpo - sum": paired(by_name["gdpo"], by_name["sum"]),
    }
    passed = differences["sum - alone"]["mean_difference"] < -LIMIT
    passed = passed and differences["gdpo - sum"]["interval_95"][0] > 0
    return {"curves": by_name, "differences": differences, "passed": passed}


def report(result: dict[str, Any], task: Task, commit: str) -> str:
    """The result as Markdown."""
    lines = [
        "# Two rewards of different scales on the tiny task",
        "",
        f"Made by `benchmarks/several_rewards.py`, commit {commit}, {task.seeds} seeds.",
        "",
        "The task's reward is between 0 and 1. The other reward is a number from 0 to 10 that has nothing to do with",
        "the task; held-out prompts are scored by the task's reward alone. Both have weight 1.",
        "",
        "![Mean reward of held-out prompts by step](several_rewards.svg)",
        "",
        *table(result["curves"], TITLES, task.every),
    ]
    for name, verdict in result["differences"].items():
        low, high = verdict["interval_95"]
        first, _, second = name.partition(" - ")
        lines += [
            "",
            f"Area, {TITLES[first]} - {TITLES[second]}: {verdict['mean_difference']:+.4f}, 95 % "
            f"[{low:+.4f}, {high:+.4f}].",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seeds", type=int, default=Task.seeds)
    parser.add_argument("--steps", type=int, default=Task.steps)
    parser.add_argument("--smoke", action="store_true", help="one seed, two steps: does it still run?")
    options = parser.parse_args(arguments)
    task = Task(seeds=options.seeds, steps=options.steps)
    if options.smoke:
        task = Task(seeds=1, steps=2, every=1, prompts=2, samples=2, heldout=4)
    with tempfile.TemporaryDirectory(prefix="several-") as scratch:
        result = judged([curves_of_seed(task, seed, Path(scratch), RUNS) for seed in range(task.seeds)])
    facts = machine(1)
    text = report(result, task, str(facts["commit"]))
    conclude("several_rewards", {"task": asdict(task), **result}, facts, options.out, text)


if __name__ == "__main__":
    main()
