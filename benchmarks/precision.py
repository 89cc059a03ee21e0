"""Measures learning curves of each number format on two tasks, and the difference of sampler and trainer in it.

    .venv/bin/python benchmarks/precision.py [--out docs/results/precision] [--smoke]

* sums: the demo. SmolLM2-135M learns to add one-digit numbers, in twelve steps at a learning rate of 2e-5. A bfloat16
  weight that is rounded to nearest hardly moves at that rate.
* letters: a tiny random model learns to write lower-case letters, in 40 steps at 2e-3.

Start, prompts, settings and seeds are the same in every format; the start is stored in bfloat16, as most checkpoints
are. TRL trains on sums, from the same start. The mean reward of all training steps is compared with that of float32,
seed by seed. A run that is complete below `--runs` is read and not repeated. Curves in OUT.json stay there unless they
are run again, and OUT is written after each run. Prints one JSON line on stdout.
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
from measure import MODEL, ROOT, TRL_PYTHON, commit, conclude, keep, machine, made_by, say
from precision_trl import SETTINGS, curve_of_trl
from tiny_task import write_tiny_task

HERE = Path(__file__).resolve().parent
KINDS: Mapping[str, tuple[str, ...]] = {
    "float32": ("actor.dtype=float32",),
    "bfloat16 stochastic": ("actor.dtype=bfloat16",),
    "bfloat16 nearest": ("actor.dtype=bfloat16", "actor.rounding=nearest"),
    "float16": ("actor.dtype=float16",),
}
ALL_KINDS = (*KINDS, *SETTINGS)
ABOUT = {
    "sums": "SmolLM2-135M-Instruct, one-digit sums, twelve steps of 8 prompts and 8 samples each, learning rate 2e-5 "
    "falling to 0, held-out prompts answered greedily. TRL bfloat16 is `bf16=True`: float32 weights and optimizer, and "
    "torch's autocast.",
    "letters": "A tiny random model, 40 steps at a learning rate of 2e-3, which is larger than the distance of most "
    "weights to the next bfloat16 number: rounding to nearest does not stop it, and the task does not tell the two "
    "roundings apart.",
}
REWARD, DIFFERENCE, ENTROPY = "reward/mean", "policy/rollout_logprob_diff", "policy/entropy"
RATIO = "policy/importance_max"
TASKS = ("sums", "letters")
COLUMNS = 12
"""The most steps that the table of a learning curve shows."""

Curves = dict[str, dict[str, dict[int, Any]]]
"""Curves by task, format and seed."""


@dataclass(frozen=True)
class Sizes:
    """Steps of each task, and prompts per step; fewer in a smoke test."""

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
    """Reward, entropy, log-prob difference and largest ratio pi_old / mu of each step, held-out reward, and commit."""
    directory = root / f"{task}_{seed}_{kind.replace(' ', '_')}"
    file, made_at = directory / "run" / "metrics.jsonl", directory / "commit"
    if not file.exists() or len(steps_in(file)) < sizes.steps[task]:
        directory.mkdir(parents=True)
        made_at.write_text(commit() or "unknown")
        shared = arguments_of(task, directory, seed, sizes, model)
        own = [f"train.dir={directory}", "train.name=run", "cluster.threads=1", "checkpoint.every_steps=0"]
        command = [str(Path(sys.executable).parent / "rlcore"), "train", *shared, *own, *KINDS[kind]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = steps_in(file)
    return {
        "reward": [row[REWARD] for row in steps],
        "entropy": [row[ENTROPY] for row in steps if ENTROPY in row],  # a step without a gradient has none
        "difference": [row[DIFFERENCE] for row in steps if DIFFERENCE in row],
        "ratio": [row[RATIO] for row in steps if RATIO in row],
        "heldout": [row["eval/heldout/mean"] for row in rows if "eval/heldout/mean" in row],
        "commit": made_at.read_text().strip(),
    }


def peer_curve_of(kind: str, seed: int, root: Path, sizes: Sizes, model: Path) -> dict[str, Any]:
    """The result of `curve_of` for TRL on sums; the difference is not logged."""
    directory = root / f"sums_{seed}_{kind.replace(' ', '_')}"
    file = directory / "curve.json"
    if not file.exists():
        directory.mkdir(parents=True)
        start = stored_in_bfloat16(model, directory / "model")
        found = curve_of_trl(kind, seed, directory, start, sizes.steps["sums"], sizes.prompts)
        file.write_text(json.dumps({**found, "commit": commit() or "unknown"}))
    return dict(json.loads(file.read_text()))


def steps_in(file: Path) -> list[dict[str, Any]]:
    """The rows of metrics that a step wrote."""
    return [row for row in map(json.loads, file.read_text().splitlines()) if REWARD in row]


def against(found: Mapping[int, Any], base: Mapping[int, Any]) -> dict[str, Any]:
    """The mean difference of the curves' heights over the seeds that both have, and its 95 % interval."""
    seeds = sorted(found.keys() & base.keys())
    means = [statistics.fmean(found[seed]["reward"]) - statistics.fmean(base[seed]["reward"]) for seed in seeds]
    if not means:
        return {"seeds": 0}
    center = statistics.fmean(means)
    half = STUDENT_T[len(means) - 1] * statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("inf")
    return {"seeds": len(means), "mean": center, "low": center - half, "high": center + half}


def report(curves: Curves, made: str) -> str:
    """The result as Markdown."""
    commits = sorted({run["commit"] for kinds in curves.values() for seeds in kinds.values() for run in seeds.values()})
    lines = ["# Number formats", "", made, f"Commits of the runs: {', '.join(commits)}.", ""]
    lines += [
        "Area: mean training reward of all steps, and its difference from float32 on the same seeds. Difference: "
        "`policy/rollout_logprob_diff`, the mean of \\|log pi_old - log mu\\| over a step's tokens; sampler (mu) "
        "and trainer (pi_old) have the same weights. Ratio: the largest pi_old / mu of a token. To add a run: "
        "`.venv/bin/python benchmarks/precision.py --out docs/results/precision --tasks sums --kinds float16 "
        "--seeds 7`.",
        "",
        "Every run, TRL's included, starts from a checkpoint whose weights are stored in bfloat16, as most checkpoints "
        "are: float32 does not start from finer numbers.",
        "",
    ]
    for task in TASKS:
        kinds = {kind: dict(sorted(seeds.items())) for kind, seeds in curves.get(task, {}).items() if seeds}
        lines += [f"## {task}", "", ABOUT[task], ""]
        lines += ["![Training reward by step](precision.svg)", ""] if task == "sums" else []
        lines += _tables(kinds) if kinds else []
        missing = [kind for kind in (ALL_KINDS if task == "sums" else KINDS) if kind not in kinds]
        lines += [f"Not run: {', '.join(missing)}.", ""] if missing else []
    return "\n".join(lines)


def _tables(kinds: Mapping[str, Mapping[int, Any]]) -> list[str]:
    steps = max(len(run["reward"]) for seeds in kinds.values() for run in seeds.values())
    shown = sorted({round(1 + index * (steps - 1) / (COLUMNS - 1)) for index in range(COLUMNS)})
    base = kinds.get("float32", {})
    compared = {kind: seeds for kind, seeds in kinds.items() if any(run["difference"] for run in seeds.values())}
    return [
        "| format | seeds | last reward, by seed | held-out, before and after | area | area - float32 (95 %) | "
        "entropy, first and last |",
        "|---|---|---|---|---|---|---|",
        *(_line(kind, seeds, base) for kind, seeds in kinds.items()),
        "",
        "Training reward by step, mean over the seeds:",
        "",
        f"| format | {' | '.join(map(str, shown))} |",
        f"|---|{'---|' * len(shown)}",
        *(_curve(kind, seeds, shown) for kind, seeds in kinds.items()),
        "",
        "Sampler and trainer, over all steps and seeds:",
        "",
        "| format | difference, mean | first step | last step | largest step | ratio, largest |",
        "|---|---|---|---|---|---|",
        *(_differences(kind, seeds) for kind, seeds in compared.items()),
        "",
    ]


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
    named = ", ".join(map(str, seeds))
    return f"| {kind} | {named} | {last} | {heldout} | {area:.3f} | {compared} | {entropy} |"


def _curve(kind: str, seeds: Mapping[int, Any], shown: Sequence[int]) -> str:
    means = [statistics.fmean(run["reward"][step - 1] for run in seeds.values()) for step in shown]
    return f"| {kind} | {' | '.join(f'{mean:.2f}' for mean in means)} |"


def _differences(kind: str, seeds: Mapping[int, Any]) -> str:
    found = [run["difference"] for run in seeds.values() if run["difference"]]
    values = [value for run in found for value in run]
    first, last = (statistics.fmean(run[at] for run in found) for at in (0, -1))
    figures = [statistics.fmean(values), first, last, max(values)]
    ratios = [value for run in seeds.values() for value in run.get("ratio", [])]
    ratio = f"{max(ratios):.3f}" if ratios else ""
    return f"| {kind} | {' | '.join(f'{figure:.1e}' for figure in figures)} | {ratio} |"


def kept_curves(out: Path | None) -> Curves:
    """The curves in OUT.json, if that file exists."""
    if out is None or not out.with_suffix(".json").exists():
        return {}
    record = json.loads(out.with_suffix(".json").read_text())
    return {
        task: {
            kind: {int(seed): {"commit": record["machine"]["commit"], **run} for seed, run in seeds.items()}
            for kind, seeds in kinds.items()
        }
        for task, kinds in record["curves"].items()
    }


def in_order(curves: Curves) -> Curves:
    """The curves with their formats in the order of `ALL_KINDS`."""
    return {task: {kind: kinds[kind] for kind in ALL_KINDS if kind in kinds} for task, kinds in curves.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--runs", type=Path, help="keep the runs here, and do not repeat those that are here")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=list(ALL_KINDS), help="TRL's: sums alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--model", type=Path, default=MODEL, help="SmolLM2-135M-Instruct")
    parser.add_argument("--smoke", action="store_true", help="letters, one seed, two steps: does it still run?")
    options = parser.parse_args(arguments)
    sizes, tasks, seeds = (SMOKE, ["letters"], [0]) if options.smoke else (SIZES, options.tasks, options.seeds)
    runs = [(task, seed, kind) for task in tasks for seed in seeds for kind in options.kinds]
    runs = [(task, seed, kind) for task, seed, kind in runs if task == "sums" or kind in KINDS]
    if not TRL_PYTHON.exists() and any(kind in SETTINGS for _, _, kind in runs):
        raise SystemExit(f"precision: {TRL_PYTHON.relative_to(ROOT)} is missing; make results-precision makes it")
    curves = kept_curves(options.out)
    with tempfile.TemporaryDirectory(prefix="precision-") as scratch:
        root = (options.runs or Path(scratch)).resolve()
        for task, seed, kind in runs:
            if kind in KINDS:
                curve = curve_of(task, kind, seed, root, sizes, options.model)
            else:
                curve = peer_curve_of(kind, seed, root, sizes, options.model)
            say(f"{task}, {kind}, seed {seed}: " + " ".join(f"{reward:.2f}" for reward in curve["reward"]))
            curves.setdefault(task, {}).setdefault(kind, {})[seed] = curve
            if options.out:
                _keep(curves, options.out)
    facts = machine(1)
    text = report(in_order(curves), made_by("benchmarks/precision.py", facts))
    conclude("precision", {"curves": in_order(curves)}, facts, options.out, text)


def _keep(curves: Curves, out: Path) -> None:
    facts = machine(1)
    keep({"curves": in_order(curves)}, facts, out, report(in_order(curves), made_by("benchmarks/precision.py", facts)))


if __name__ == "__main__":
    main()
