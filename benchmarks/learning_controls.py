"""Compares PPO and late samples with synchronous GRPO on the tiny task, each with a control that lacks its key part.

    .venv/bin/python benchmarks/learning_controls.py [--out docs/results/learning_controls] [--smoke]

Task, start, prompts, rewards, number of samples, seeds, area, interval and limit are those of `learning_vs_trl.py`,
which shows that GRPO learns as TRL does. Compared with GRPO are:

* PPO. Its control is PPO with its critic frozen at 0, which must fail the same check. PPO does not whiten its
  advantages here, because the batch's mean would replace the critic.
* GRPO on samples that are up to one and up to four versions old. Its control forces the ratio to 1, as if the current
  weights had drawn the samples, and so shows the value of the correction on this task.

Prints one JSON line on stdout.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from learning_vs_trl import ANSWER_S, Task, curve, our_side, paired
from measure import conclude, machine, say
from tiny_task import write_tiny_task

PPO = ("algo.preset=ppo", "algo.whiten_advantages=false")
STALE = "schedule.max_staleness={}"
RUNS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": (*PPO, "plugins.critic_engine.lr=5e-3"),
    "ppo_frozen": (*PPO, "plugins.critic_engine.lr=0"),
    "one_late": (STALE.format(1),),
    "four_late": (STALE.format(4),),
    "four_late_ratio_1": (STALE.format(4), "algo.importance.correction=none"),
}
TITLES = {
    "grpo": "GRPO",
    "ppo": "PPO",
    "ppo_frozen": "PPO, critic frozen at 0",
    "one_late": "GRPO, at most 1 late",
    "four_late": "GRPO, at most 4 late",
    "four_late_ratio_1": "the same, ratio forced to 1",
}
MUST_PASS = ("ppo", "one_late")
MUST_FAIL = ("ppo_frozen",)
INDISTINGUISHABLE = (
    "Forcing the ratio to 1 was meant to be a control, and it passes: on this task samples of up to four versions "
    "before differ too little from those of the moment for the correction to matter. That its numbers are right is "
    "shown by the tests of `algo.importance`."
)
PLUGINS = {name: ["critic_engine"] for name in ("ppo", "ppo_frozen")}


def curves_of_seed(task: Task, seed: int, root: Path, runs: Mapping[str, Sequence[str]]) -> dict[str, list[float]]:
    """The curve of each run, given its overrides; all runs start from the same model."""
    directory = root / f"seed_{seed}"
    model = write_tiny_task(directory / "model", seed=seed)
    found = {}
    for name, overrides in runs.items():
        own = directory / name
        own.mkdir()
        with our_side(task, model, own, seed, "letter_share", overrides, PLUGINS.get(name, [])) as side:
            side.answer(ANSWER_S)
            found[name] = curve(side, task)
        say(f"seed {seed}, {name}: " + " ".join(f"{value:.3f}" for value in found[name]))
    return found


def judged(curves: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Each run compared with GRPO."""
    by_name = {name: [curve[name] for curve in curves] for name in curves[0]}
    against = {name: paired(rows, by_name["grpo"]) for name, rows in by_name.items() if name != "grpo"}
    return {
        "curves": by_name,
        "against_grpo": against,
        "passed": all(against[name]["within_noise"] for name in MUST_PASS if name in against)
        and not any(against[name]["within_noise"] for name in MUST_FAIL if name in against),
    }


def report(result: dict[str, Any], task: Task, commit: str) -> str:
    """The result as Markdown."""
    lines = [
        "# PPO and late samples on the tiny task",
        "",
        f"Made by `benchmarks/learning_controls.py`, commit {commit}, {task.seeds} seeds.",
        "",
        "![Mean reward of held-out prompts by step](learning_controls.svg)",
        "",
        *table(result["curves"], TITLES, task.every),
    ]
    for name, verdict in result["against_grpo"].items():
        low, high = verdict["interval_95"]
        phrase = "within noise" if verdict["within_noise"] else "not within noise"
        role = ", a control that must fail" if name in MUST_FAIL else ""
        lines += [
            "",
            f"Area, {TITLES[name]} - GRPO: {verdict['mean_difference']:+.4f}, 95 % [{low:+.4f}, {high:+.4f}]: "
            f"{phrase}{role}.",
        ]
    if result["against_grpo"].get("four_late_ratio_1", {}).get("within_noise"):
        lines += ["", INDISTINGUISHABLE]
    return "\n".join(lines) + "\n"


def table(curves: Mapping[str, Sequence[Sequence[float]]], titles: Mapping[str, str], every: int) -> list[str]:
    """The mean over the seeds of each run, by step."""
    lines = [
        "Mean reward of held-out prompts:",
        "",
        "| step | " + " | ".join(titles[name] for name in curves) + " |",
        "|---" * (len(curves) + 1) + "|",
    ]
    means = [[statistics.fmean(column) for column in zip(*curves[name], strict=True)] for name in curves]
    for index, row in enumerate(zip(*means, strict=True)):
        lines.append(f"| {index * every} | " + " | ".join(f"{value:.3f}" for value in row) + " |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seeds", type=int, default=Task.seeds)
    parser.add_argument("--steps", type=int, default=Task.steps)
    parser.add_argument("--lr", type=float, default=Task.lr)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--smoke", action="store_true", help="one seed, two steps: does it still run?")
    options = parser.parse_args(arguments)
    task = Task(seeds=options.seeds, steps=options.steps, lr=options.lr)
    if options.smoke:
        task = Task(seeds=1, steps=2, every=1, prompts=2, samples=2, heldout=4)
    runs = {name: RUNS[name] for name in ("grpo", *options.runs)}
    with tempfile.TemporaryDirectory(prefix="learning-") as scratch:
        result = judged([curves_of_seed(task, seed, Path(scratch), runs) for seed in range(task.seeds)])
    facts = machine(1)
    text = report(result, task, str(facts["commit"]))
    conclude("learning_controls", {"task": asdict(task), **result}, facts, options.out, text)


if __name__ == "__main__":
    main()
