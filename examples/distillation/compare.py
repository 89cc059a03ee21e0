"""Does a student learn faster from a teacher's tokens than from rewards?

    make demo ARGS=train.name=teacher
    python examples/distillation/compare.py [--out docs/results/distillation] [--seeds 3] [OVERRIDE...]

The teacher is the model that GRPO trained in the demo. Both kinds of run begin with the model that it began as, and
have the same prompts, samples per step and learning rate. One kind learns from the teacher and from no reward
(`config.yaml`), the other is the demo's GRPO on rewards, with other seeds than the teacher's. What is compared is the
area under the curve of held-out accuracy, seed by seed, with its 95 % interval. Curves and areas are written to
OUT.json and OUT.md; further arguments are overrides of every run. Runs lie below `runs/distillation/`, and one that is
there already and complete is read, not repeated.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import Run, arguments, compared, end, facts, sentence, table, trained, write  # noqa: E402

RUNS_DIR = Path("runs") / "distillation"
DEMO = HERE.parent / "arithmetic" / "config.yaml"
TEACHERS_SEED = 0
"""That of the demo. A GRPO run with the same seed would be the teacher's."""
QUICK_TASK = (
    "So a teacher teaches no faster on this task, of which GRPO learns most in the first steps. Distillation needs no "
    "reward and one sample per prompt: its steps have 64 prompts, those of GRPO 8 with 8 samples each."
)
TIMES = ("| s/step", "| min/run")
"""Rows that are left out: machines differ, and the runs' lengths are compared in steps."""
TITLES = {"distilled": "distillation", "grpo": "GRPO"}


def report(runs: dict[str, list[Run]], verdict: dict[str, Any], made: dict[str, str]) -> list[str]:
    """The result as Markdown."""
    return [
        "# Distillation",
        "",
        f"Made by `examples/distillation/compare.py`, commit {made['commit']}, {made['machine']}, "
        f"{len(runs['grpo'])} seeds.",
        "",
        "![Held-out accuracy by step](distillation.svg)",
        "",
        "Held-out sums that are right, greedy, mean over seeds. The teacher is a model after 12 steps of GRPO.",
        "",
        *(line for line in table(runs, TITLES) if not line.startswith(TIMES)),
        "",
        sentence(f"{TITLES['distilled']} - {TITLES['grpo']}", verdict),
        *(["", QUICK_TASK] if verdict["within_noise"] else []),
    ]


def run(name: str, seed: int, overrides: Sequence[str]) -> Run:
    """One of the runs, trained unless done."""
    file = HERE / "config.yaml" if name == "distilled" else DEMO
    settings = ["--plugin", "digit_sum", "eval.every_steps=2", *overrides, f"train.seed={seed}"]
    return trained(RUNS_DIR / f"{name}_{seed}", [file], settings, f"{TITLES[name]}, seed {seed}")


def main() -> None:
    """Run the missing ones, compare, print one JSON line."""
    options = arguments(__doc__).parse_args()
    seeds = range(TEACHERS_SEED + 1, TEACHERS_SEED + 1 + options.seeds)
    by_seed = [{name: run(name, seed, options.overrides) for name in TITLES} for seed in seeds]
    runs = {name: [found[name] for found in by_seed] for name in TITLES}
    verdict, made = compared(runs["distilled"], runs["grpo"]), facts()
    result = {"verdict": verdict, "ends": {name: end(found) for name, found in runs.items()}, **made}
    print(json.dumps({"name": "distillation", **result}))
    if options.out:
        curves = {name: [{"curve": found["curve"]} for found in seeds] for name, seeds in runs.items()}
        write(options.out, {"runs": curves, **result, "overrides": options.overrides}, report(runs, verdict, made))


if __name__ == "__main__":
    main()
