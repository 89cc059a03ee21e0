"""Does PPO reach what GRPO reaches? Runs both, and two controls that must not pass for equal.

    python examples/ppo_critic/compare.py [--out docs/results/ppo_critic] [--seeds 3] [OVERRIDE...]

Every run has the prompts, the number of samples and the seeds of `config.yaml`. What is compared is the area under the
curve of held-out accuracy, seed by seed: equal within noise is a mean difference of at most 0.05, whose 95 % interval
is printed. The controls are PPO with its critic frozen at 0 (its learning rate is 0, and the head starts there), and
PPO whose rewards are dealt out at random within the batch. Curves, areas and verdicts are written to OUT.json and
OUT.md; further arguments are overrides of every run. Runs lie below `runs/ppo_critic/`, and one that is there already
and complete is read, not repeated.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RUNS_DIR = Path("runs") / "ppo_critic"
LIMIT = 0.05
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles by degrees of freedom."""
SATURATED = 0.95
"""A task that both solve at the end tells little: then the verdict says so."""

CRITIC_LR = 1e-4
PPO = ("--plugin", "critic_engine", "algo.preset=ppo")
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("algo.preset=grpo",),
    "ppo": (*PPO, f"plugins.critic_engine.lr={CRITIC_LR}"),
    "frozen": (*PPO, "plugins.critic_engine.lr=0"),
    "permuted": (
        *PPO,
        f"plugins.critic_engine.lr={CRITIC_LR}",
        f"reward.functions.accuracy.fn={HERE / 'permuted.py'}:permuted",
        "reward.functions.accuracy.scope=batch",
        "reward.canary=",
    ),
}
TITLES = {"grpo": "GRPO", "ppo": "PPO", "frozen": "PPO, critic frozen at 0", "permuted": "PPO, rewards permuted"}


def run(name: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train one, unless it was; its curve {step: held-out accuracy}, seconds a step, and explained variance."""
    directory = RUNS_DIR / f"{name}_{seed}"
    settings = [*RUNS[name], *overrides, f"train.seed={seed}"]
    done = directory / "done.json"
    if done.exists() and json.loads(done.read_text()) != settings:
        sys.exit(f"compare: {directory} was run with other settings, {done.read_text()}; remove it")
    if not done.exists():
        command = [sys.executable, "-m", "rlcore", "train", str(HERE / "config.yaml"), *settings]
        command += [f"train.dir={RUNS_DIR}", f"train.name={directory.name}"]
        print(f"{TITLES[name]}, seed {seed}", file=sys.stderr, flush=True)
        if directory.exists():
            command.append("--resume")
        subprocess.run([*command, "checkpoint.at_end=false"], cwd=Path.cwd(), stdout=sys.stderr, check=True)
        done.write_text(json.dumps(settings))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    explained = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row]
    return {
        "curve": {row["step"]: row["eval/heldout/mean"] for row in rows if "eval/heldout/mean" in row},
        "step_s": statistics.median(seconds),
        "explained_variance": explained,
    }


def area(curve: dict[int, float]) -> float:
    """The mean height of the curve over its steps, by trapezoids."""
    steps = sorted(curve)
    total = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(steps))
    return total / (steps[-1] - steps[0])


def compared(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean paired difference of areas, its 95 % interval (infinite of one seed), and whether it is within noise."""
    differences = [area(a["curve"]) - area(b["curve"]) for a, b in zip(one, other, strict=True)]
    mean, half = statistics.fmean(differences), math.inf
    if len(differences) > 1:
        half = STUDENT_T[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return {"difference": mean, "interval_95": [mean - half, mean + half], "within_noise": abs(mean) <= LIMIT}


def judged(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Each against GRPO. Passed: PPO is within noise, the controls are not, and the task is not saturated."""
    verdicts = {name: compared(runs[name], runs["grpo"]) for name in RUNS if name != "grpo"}
    ends = {name: statistics.fmean(each["curve"][max(each["curve"])] for each in found) for name, found in runs.items()}
    saturated = min(ends["grpo"], ends["ppo"]) > SATURATED
    controls = all(not verdicts[name]["within_noise"] for name in ("frozen", "permuted"))
    passed = verdicts["ppo"]["within_noise"] and controls and not saturated
    return {"verdicts": verdicts, "ends": ends, "saturated": saturated, "passed": passed}


def report(runs: dict[str, list[dict[str, Any]]], judgement: dict[str, Any], facts: dict[str, Any]) -> str:
    """The result as Markdown."""
    steps = sorted(runs["grpo"][0]["curve"])
    lines = ["# PPO beside GRPO", ""]
    lines.append(
        f"Made by `examples/ppo_critic/compare.py`, commit {facts['commit']}, {facts['machine']}, "
        f"{len(runs['grpo'])} seeds."
    )
    lines += ["Held-out accuracy (greedy), mean over seeds:", ""]
    lines += [f"| step | {' | '.join(TITLES[name] for name in runs)} |", f"|---|{'---|' * len(runs)}"]
    for step in steps:
        means = (statistics.fmean(each["curve"][step] for each in found) for found in runs.values())
        lines.append(f"| {step} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    lines.append("| s/step | " + " | ".join(f"{statistics.median(e['step_s'] for e in f):.1f}" for f in runs.values()))
    lines[-1] += " |"
    for name, verdict in judgement["verdicts"].items():
        low, high = verdict["interval_95"]
        lines += ["", f"Area, {TITLES[name]} - GRPO: {verdict['difference']:+.4f}, 95 % [{low:+.4f}, {high:+.4f}]: "]
        lines[-1] += "within noise." if verdict["within_noise"] else "not within noise."
    if judgement["saturated"]:
        lines += ["", f"Both end above {SATURATED}: the task is saturated, and the end of the curves tells little."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, compare, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="overrides of every run")
    options = parser.parse_args()
    runs = {name: [run(name, seed, options.overrides) for seed in range(options.seeds)] for name in RUNS}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    facts = {"commit": commit.stdout.strip() or "unknown", "machine": f"{platform.machine()} {platform.system()}"}
    judgement = judged(runs)
    print(json.dumps({"name": "ppo_critic", **judgement, **facts}))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"runs": runs, **judgement, **facts, "overrides": options.overrides}
        options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(report(runs, judgement, facts))


if __name__ == "__main__":
    main()
