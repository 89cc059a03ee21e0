"""Learning curves of each number format on two tasks, and how far sampler and trainer differ in it.

    .venv/bin/python benchmarks/precision.py [--out docs/results/precision] [--smoke]

sums: the demo, SmolLM2-135M learns to add one-digit numbers, twelve steps at a learning rate of 2e-5, at which a
bfloat16 weight that is rounded to nearest hardly moves. letters: a tiny random model learns to write lower-case
letters, 40 steps at 2e-3. Same start, prompts, settings and seeds in every format; the start is stored in bfloat16, as
most checkpoints are. Compared with float32 is the mean reward of all training steps, seed by seed. A run that is
complete below `--runs` is read and not run again. One JSON line on stdout.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_vs_trl import STUDENT_T, conversation
from measure import MODEL, ROOT, conclude, machine, made_by, say
from tiny_task import write_tiny_task

HERE = Path(__file__).resolve().parent
KINDS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16 stochastic": ("actor.dtype=bfloat16",),
    "bfloat16 nearest": ("actor.dtype=bfloat16", "actor.rounding=nearest"),
    "float16": ("actor.dtype=float16",),
}
ABOUT = {
    "sums": "SmolLM2-135M-Instruct, one-digit sums, twelve steps, learning rate 2e-5 falling to 0.",
    "letters": "A tiny random model, 40 steps at a learning rate of 2e-3, which is larger than the distance of most "
    "weights to the next bfloat16 number: rounding to nearest does not stop it, and the task does not tell the two "
    "roundings apart.",
}
REWARD, DIFFERENCE, ENTROPY = "reward/mean", "policy/rollout_logprob_diff", "policy/entropy"
TASKS = ("sums", "letters")


@dataclass(frozen=True)
class Sizes:
    """Steps of each task and prompts of a step; fewer in a smoke test."""

    steps: Mapping[str, int]
    prompts: int = 8
    heldout: int = 128


SIZES = Sizes({"sums": 12, "letters": 40})
SMOKE = Sizes({"sums": 1, "letters": 2}, prompts=2, heldout=4)


def arguments_of(task: str, directory: Path, seed: int, sizes: Sizes, model: Path) -> list[str]:
    """The arguments of `rlcore train` that all formats share; files that they name are written into `directory`."""
    common = [f"train.seed={seed}", f"train.max_steps={sizes.steps[task]}", f"train.prompts_per_step={sizes.prompts}"]
    if task == "sums":
        start = stored_in_bfloat16(model, directory / "model")
        return ["examples/arithmetic/config.yaml", "--plugin", "digit_sum", f"model.path={start}", *common]
    count = sizes.prompts * sizes.steps[task]
    for name, first, num in (("train", 0, count), ("heldout", 100_000, sizes.heldout)):
        rows = [json.dumps({"prompt": conversation(first + index), "answer": ""}) for index in range(num)]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config = {
        "model": {
            "path": str(stored_in_bfloat16(write_tiny_task(directory / "exact", seed=seed), directory / "model"))
        },
        "data": {"sources": {"train": {"path": str(directory / "train.jsonl")}}, "shuffle": False},
        "eval": {"sources": {"heldout": {"path": str(directory / "heldout.jsonl")}}, "temperature": 1.0},
        "rollout": {"samples_per_prompt": 8, "max_tokens": 16},
        "reward": {"functions": {"letters": {"fn": f"{HERE / 'reward.py'}:letter_share"}}},
        "actor": {"lr": 2e-3},
    }
    (directory / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return [str(directory / "config.yaml"), *common]


def stored_in_bfloat16(model: Path, directory: Path) -> Path:
    """The model with its weights rounded, and its tokenizer, in a new directory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)
    return directory


def curve_of(task: str, kind: str, seed: int, root: Path, sizes: Sizes, model: Path) -> dict[str, Any]:
    """Reward, entropy and log-prob difference of each step, and the held-out reward before and after."""
    directory = root / f"{task}_{seed}_{kind.replace(' ', '_')}"
    file = directory / "run" / "metrics.jsonl"
    if not file.exists() or len(steps_in(file)) < sizes.steps[task]:
        directory.mkdir(parents=True)
        shared = arguments_of(task, directory, seed, sizes, model)
        own = [f"train.dir={directory}", "train.name=run", "cluster.threads=1", "checkpoint.every_steps=0"]
        command = [str(Path(sys.executable).parent / "rlcore"), "train", *shared, *own, *KINDS[kind]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = steps_in(file)
    say(f"{task}, {kind}, seed {seed}: " + " ".join(f"{row[REWARD]:.2f}" for row in steps))
    return {
        "reward": [row[REWARD] for row in steps],
        "entropy": [row[ENTROPY] for row in steps],
        "difference": [row[DIFFERENCE] for row in steps if DIFFERENCE in row],
        "heldout": [row["eval/heldout/mean"] for row in rows if "eval/heldout/mean" in row],
    }


def steps_in(file: Path) -> list[dict[str, Any]]:
    """The rows of metrics that a step wrote."""
    return [row for row in map(json.loads, file.read_text().splitlines()) if REWARD in row]


def against(found: Mapping[int, Any], base: Mapping[int, Any]) -> dict[str, Any]:
    """The mean difference of the curves' heights over seeds that both have, and its 95 % interval."""
    seeds = sorted(found.keys() & base.keys())
    means = [statistics.fmean(found[seed]["reward"]) - statistics.fmean(base[seed]["reward"]) for seed in seeds]
    if not means:
        return {"seeds": 0}
    center = statistics.fmean(means)
    half = STUDENT_T[len(means) - 1] * statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("inf")
    return {"seeds": len(means), "mean": center, "low": center - half, "high": center + half}


def report(curves: Mapping[str, Mapping[str, Mapping[int, Any]]], made: str) -> str:
    """The result as Markdown."""
    lines = ["# Number formats", "", made, ""]
    for task, kinds in curves.items():
        lines += [
            f"## {task}",
            "",
            ABOUT[task],
            "",
            "Mean over the seeds. Area: mean training reward of all steps, and its difference from float32 on the same "
            "seeds. Difference: `policy/rollout_logprob_diff`, mean over steps.",
            "",
            "| format | seeds | last reward, by seed | held-out, before and after | area | area - float32 (95 %) | "
            "entropy, first and last | difference |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(kind, seeds, kinds.get("float32", {})) for kind, seeds in kinds.items() if seeds]
        lines.append("")
    for task in TASKS:
        if task not in curves:
            lines += [
                f"## {task}",
                "",
                f"Not run: `.venv/bin/python benchmarks/precision.py --tasks {task}` runs it.",
                "",
            ]
    return "\n".join(lines)


def _line(kind: str, seeds: Mapping[int, Any], base: Mapping[int, Any]) -> str:
    runs = list(seeds.values())
    verdict = against(seeds, base)
    compared = "" if kind == "float32" or not verdict["seeds"] else f"{verdict['mean']:+.3f}"
    if compared and verdict["seeds"] > 1:
        compared += f" [{verdict['low']:+.3f}, {verdict['high']:+.3f}]"
    last = ", ".join(f"{run['reward'][-1]:.2f}" for run in runs)
    heldout = " -> ".join(f"{statistics.fmean(run['heldout'][at] for run in runs):.2f}" for at in (0, -1))
    entropy = " -> ".join(f"{statistics.fmean(run['entropy'][at] for run in runs):.2f}" for at in (0, -1))
    area = statistics.fmean(statistics.fmean(run["reward"]) for run in runs)
    differences = [value for run in runs for value in run["difference"]]
    difference = f"{statistics.fmean(differences):.1e}" if differences else ""
    return f"| {kind} | {len(runs)} | {last} | {heldout} | {area:.3f} | {compared} | {entropy} | {difference} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and do not repeat those that are here")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=MODEL, help="SmolLM2-135M-Instruct")
    parser.add_argument("--smoke", action="store_true", help="letters, one seed, two steps: does it still run?")
    options = parser.parse_args(arguments)
    sizes, tasks, seeds = (SMOKE, ["letters"], 1) if options.smoke else (SIZES, options.tasks, options.seeds)
    curves: dict[str, dict[str, dict[int, Any]]] = {task: {kind: {} for kind in options.kinds} for task in tasks}
    with tempfile.TemporaryDirectory(prefix="precision-") as scratch:
        root = (options.runs or Path(scratch)).resolve()
        for task, seed, kind in (
            (task, seed, kind) for task in tasks for seed in range(seeds) for kind in options.kinds
        ):
            curves[task][kind][seed] = curve_of(task, kind, seed, root, sizes, options.model)
    facts = machine(1)
    conclude(
        "precision", {"curves": curves}, facts, options.out, report(curves, made_by("benchmarks/precision.py", facts))
    )


if __name__ == "__main__":
    main()
