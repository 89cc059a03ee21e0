"""Compares learning curves of ours and of TRL on the same task: they must be equal within noise.

    .venv/bin/python benchmarks/learning_vs_trl.py [--out docs/results/vs_trl_learning] [--smoke]

A tiny random model learns to write lower-case letters. Start, prompts, settings, reward and held-out prompts are the
same; there are five seeds. The comparison is of the area under the held-out curve, seed by seed: the mean difference
must be at most 0.05. A control run of ours whose rewards are permuted at random within the batch must fail the same
check. Prints one JSON line on stdout.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from channel import Side
from measure import ROOT, TRL_PYTHON, conclude, machine, say, versions_in
from scenarios import WORDS
from tiny_task import write_tiny_task

HERE = Path(__file__).resolve().parent
LIMIT = 0.05
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles by degrees of freedom."""
ANSWER_S = 240.0


@dataclass(frozen=True)
class Task:
    """The task of both sides."""

    seeds: int = 5
    steps: int = 40
    every: int = 4
    """Steps between two evaluations."""
    prompts: int = 8
    samples: int = 8
    new_tokens: int = 16
    heldout: int = 256
    lr: float = 2e-3


def conversation(index: int) -> list[dict[str, str]]:
    """A prompt; all prompts differ."""
    word = WORDS[index % len(WORDS)]
    return [{"role": "user", "content": f"{word} {index}"}]


def our_side(
    task: Task,
    model: Path,
    directory: Path,
    seed: int,
    reward: str,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
) -> Side:
    """Our side, started."""
    for name, first, count in (("train", 0, task.prompts * task.steps), ("heldout", 100_000, task.heldout)):
        rows = [json.dumps({"prompt": conversation(first + index), "answer": ""}) for index in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    function: dict[str, Any] = {"fn": f"{HERE / 'reward.py'}:{reward}"}
    if reward.startswith("permuted"):
        function["scope"] = "batch"
    config = {
        "model": {"path": str(model)},
        "data": {"sources": {"train": {"path": str(directory / "train.jsonl")}}, "shuffle": False},
        "eval": {"sources": {"heldout": {"path": str(directory / "heldout.jsonl")}}, "temperature": 1.0},
        "rollout": {"samples_per_prompt": task.samples, "max_tokens": task.new_tokens},
        "reward": {"functions": {"letters": function}},
        "actor": {"lr": task.lr, "dtype": "float32"},
        "train": {"prompts_per_step": task.prompts, "max_steps": task.steps, "seed": seed},
        "cluster": {"threads": 1},
    }
    spec = {"config": config, "overrides": overrides, "plugins": plugins, "run_dir": str(directory / "run")}
    return Side("ours", Path(sys.executable), HERE / "rlcore_side.py", spec, threads=1)


def trl_side(task: Task, model: Path, directory: Path, seed: int) -> Side:
    """TRL's side, started."""
    spec = {
        "model": str(model),
        "dtype": "float32",
        "prompts": [conversation(index) for index in range(task.prompts * task.steps)],
        "prompts_per_step": task.prompts,
        "samples": task.samples,
        "new_tokens": task.new_tokens,
        "micro_batch": task.prompts * task.samples,
        "lr": task.lr,
        "threads": 1,
        "seed": seed,
        "max_steps": task.steps + 1,  # the last evaluation comes where another step would begin
        "reward": "letter_share",
        "heldout": [conversation(100_000 + index) for index in range(task.heldout)],
        "work_dir": str(directory / "work"),
    }
    return Side("TRL", TRL_PYTHON, HERE / "trl_side.py", spec, threads=1)


def curve(side: Side, task: Task) -> list[float]:
    """Mean held-out reward at the start and after every `every` steps."""
    rewards = [evaluated(side)]
    for step in range(1, task.steps + 1):
        side.ask({"do": "step"}, ANSWER_S)
        if step % task.every == 0:
            rewards.append(evaluated(side))
    return rewards


def evaluated(side: Side) -> float:
    """The mean reward of held-out prompts, with one sampled completion each."""
    answer = side.ask({"do": "evaluate"}, ANSWER_S)
    return float(answer["reward"] if "reward" in answer else answer["eval/heldout/mean"])


def curves_of_seed(task: Task, seed: int, root: Path) -> dict[str, list[float]]:
    """The curves of ours, TRL and the control; all start from the same model."""
    directory = root / f"seed_{seed}"
    model = write_tiny_task(directory / "model", seed=seed)
    found = {}
    for name in ("ours", "trl", "control"):
        own = directory / name
        own.mkdir()
        if name == "trl":
            started = trl_side(task, model, own, seed)
        else:
            started = our_side(task, model, own, seed, "permuted_letter_share" if name == "control" else "letter_share")
        with started as side:
            side.answer(ANSWER_S)
            found[name] = curve(side, task)
        say(f"seed {seed}, {name}: " + " ".join(f"{value:.3f}" for value in found[name]))
    return found


def area(curve: Sequence[float]) -> float:
    """The mean height of the curve, by trapezoids."""
    inner = sum(curve) - (curve[0] + curve[-1]) / 2
    return inner / (len(curve) - 1)


def paired(ours: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean difference of areas, its 95 % interval, and True if it is within noise: at most 0.05 either way."""
    differences = [area(left) - area(right) for left, right in zip(ours, others, strict=True)]
    mean = statistics.fmean(differences)
    half = 0.0
    if len(differences) > 1:
        half = STUDENT_T[len(differences) - 1] * statistics.stdev(differences) / len(differences) ** 0.5
    return {"mean_difference": mean, "interval_95": [mean - half, mean + half], "within_noise": abs(mean) <= LIMIT}


def judged(curves: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Ours compared with TRL, and the control, which must fail the comparison with TRL."""
    by_name = {name: [curve[name] for curve in curves] for name in ("ours", "trl", "control")}
    ends = {name: statistics.fmean(rows[-1] for rows in found) for name, found in by_name.items()}
    against_trl, control = paired(by_name["ours"], by_name["trl"]), paired(by_name["control"], by_name["trl"])
    return {
        "curves": by_name,
        "start": statistics.fmean(rows[0] for rows in by_name["trl"]),
        "end": ends,
        "saturated": ends["trl"] > 0.95,
        "ours_vs_trl": against_trl,
        "control_vs_trl": control,
        "passed": against_trl["within_noise"] and not control["within_noise"] and ends["trl"] <= 0.95,
    }


def report(result: dict[str, Any], task: Task) -> str:
    """The result as Markdown."""
    mean = {
        name: [statistics.fmean(column) for column in zip(*rows, strict=True)]
        for name, rows in result["curves"].items()
    }
    lines = [
        "# Learning curves of rlcore and TRL",
        "",
        f"Made by `benchmarks/learning_vs_trl.py`, {task.seeds} seeds. Mean reward of held-out prompts, which is the",
        "share of lower-case letters in a sampled completion:",
        "",
        "![Held-out reward by step](vs_trl_learning.svg)",
        "",
        "| step | ours | TRL | rewards permuted |",
        "|---|---|---|---|",
    ]
    for index, row in enumerate(zip(mean["ours"], mean["trl"], mean["control"], strict=True)):
        lines.append(f"| {index * task.every} | " + " | ".join(f"{value:.3f}" for value in row) + " |")
    for title, key in (("ours - TRL", "ours_vs_trl"), ("permuted - TRL", "control_vs_trl")):
        low, high = result[key]["interval_95"]
        verdict = "within noise" if result[key]["within_noise"] else "not within noise"
        lines += [
            "",
            f"Area, {title}: {result[key]['mean_difference']:+.4f}, 95 % [{low:+.4f}, {high:+.4f}]: {verdict}.",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seeds", type=int, default=Task.seeds)
    parser.add_argument("--steps", type=int, default=Task.steps)
    parser.add_argument("--lr", type=float, default=Task.lr)
    parser.add_argument("--smoke", action="store_true", help="one seed, two steps: does it still run?")
    options = parser.parse_args(arguments)
    if not TRL_PYTHON.exists():
        raise SystemExit(f"learning_vs_trl: {TRL_PYTHON.relative_to(ROOT)} is missing; make bench makes it")
    task = Task(seeds=options.seeds, steps=options.steps, lr=options.lr)
    if options.smoke:
        task = Task(seeds=1, steps=2, every=1, prompts=2, samples=2, heldout=4)
    with tempfile.TemporaryDirectory(prefix="learning-") as scratch:
        result = judged([curves_of_seed(task, seed, Path(scratch)) for seed in range(task.seeds)])
    facts = machine(1) | {"trl_versions": versions_in(TRL_PYTHON)}
    conclude("learning_vs_trl", {"task": asdict(task), **result}, facts, options.out, report(result, task))


if __name__ == "__main__":
    main()
