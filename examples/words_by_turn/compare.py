"""Does credit for each turn teach faster than one reward for the whole conversation?

    python examples/words_by_turn/compare.py [--out docs/results/words_by_turn] [--seeds 3] [OVERRIDE...]

Every run has the prompts, the number of samples and the seeds of `config.yaml`. One kind of run has the rewards of
turns (`environment_by_turn`) and compares turn by turn (`turn_rloo`). The other has their sum (`environment`) and
compares whole samples (`rloo`). What is compared is the area under the curve of held-out answers, seed by seed, with
its 95 % interval. Curves and areas are written to OUT.json and OUT.md; further arguments are overrides of every run.
Runs lie below `runs/words_by_turn/`, and one that is there already and complete is read, not repeated.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import Run, arguments, compared, end, facts, sentence, table, trained, write  # noqa: E402

RUNS_DIR = Path("runs") / "words_by_turn"
SAME_SKILL = (
    "So credit for each turn teaches no faster on this task: all four questions ask for one skill, and what one turn "
    "teaches helps the others. That `turn_rloo` has no bias, and that each turn has a separate advantage, "
    "is shown by the tests."
)
RUNS: dict[str, tuple[str, ...]] = {
    "turns": (),
    "sum": ("reward.functions.words.fn=environment", "algo.advantage=rloo"),
}
TIMES = ("| s/step", "| min/run")
"""Rows that are left out: both kinds of run do the same work."""
TITLES = {"turns": "credit for each turn", "sum": "one reward for all turns"}


def report(runs: dict[str, list[Run]], verdict: dict[str, Any], made: dict[str, str]) -> list[str]:
    """The result as Markdown."""
    return [
        "# Credit for each turn",
        "",
        f"Made by `examples/words_by_turn/compare.py`, commit {made['commit']}, {made['machine']}, "
        f"{len(runs['turns'])} seeds.",
        "",
        "![Held-out answers by step](words_by_turn.svg)",
        "",
        "Share of the four questions answered right, held out, mean over seeds:",
        "",
        *(line for line in table(runs, TITLES) if not line.startswith(TIMES)),
        "",
        sentence(f"{TITLES['turns']} - {TITLES['sum']}", verdict),
        *(["", SAME_SKILL] if verdict["within_noise"] else []),
    ]


def run(name: str, seed: int, overrides: Sequence[str]) -> Run:
    """One of the runs, trained unless done."""
    settings = ["--plugin", "agent_loop", *RUNS[name], *overrides, f"train.seed={seed}"]
    return trained(RUNS_DIR / f"{name}_{seed}", [HERE / "config.yaml"], settings, f"{TITLES[name]}, seed {seed}")


def main() -> None:
    """Run the missing ones, compare, print one JSON line."""
    options = arguments(__doc__).parse_args()
    by_seed = [{name: run(name, seed, options.overrides) for name in RUNS} for seed in range(options.seeds)]
    runs = {name: [found[name] for found in by_seed] for name in RUNS}
    verdict, made = compared(runs["turns"], runs["sum"]), facts()
    result = {"verdict": verdict, "ends": {name: end(found) for name, found in runs.items()}, **made}
    print(json.dumps({"name": "words_by_turn", **result}))
    if options.out:
        curves = {name: [{"curve": found["curve"]} for found in seeds] for name, seeds in runs.items()}
        write(options.out, {"runs": curves, **result, "overrides": options.overrides}, report(runs, verdict, made))


if __name__ == "__main__":
    main()
