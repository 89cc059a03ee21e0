"""Compares schedules under a slow reward: the share that each hides, and the cost of one step of staleness.

    python examples/slow_reward/compare.py [--out docs/results/slow_reward] [--seeds 3] [--ci] [OVERRIDE...]

Starts the service (0.25 to 10 s per call, one in a hundred fails), then trains `config.yaml` synchronously and one step
off-policy with every seed, and both with streamed mini-batches with the first. Of each mode: the time of its steps over
`time/ideal_s`, the replay of the same steps without any loss, which is to be at most 1.05. Of the curves of
held-out accuracy: the mean paired difference of areas, equal within noise up to 0.05. `--ci` is a policy without torch
for two steps, which shows that this script works and nothing else. Further arguments are overrides of every run. Runs
lie below `runs/slow_reward/`; one that is there already and complete is read, not repeated.
"""

import json
import statistics
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from curves import Run, arguments, compared, facts, sentence, table, trained, write  # noqa: E402
from service import PORT, serve  # noqa: E402

RUNS_DIR = Path("runs") / "slow_reward"
LARGEST_RATIO = 1.05
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": ("schedule.max_staleness=0", "schedule.stream_minibatches=false"),
    "one_step_off": ("schedule.max_staleness=1", "schedule.stream_minibatches=false"),
    "pipeline": ("schedule.max_staleness=0", "schedule.stream_minibatches=true"),
    "one_step_off_pipeline": ("schedule.max_staleness=1", "schedule.stream_minibatches=true"),
}
TITLES = {
    "synchronous": "synchronous",
    "one_step_off": "one step off-policy",
    "pipeline": "mini-batch pipeline",
    "one_step_off_pipeline": "one step off-policy pipeline",
}
CURVES = ("synchronous", "one_step_off")
"""Modes that every seed is run in; the others show their speed once."""


def timed(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of a run's steps, without the first, which warms up: mean seconds, the ideal, and how many times as long."""
    steps = [row for row in rows if "time/ideal_s" in row][1:]
    step_s = statistics.fmean(row["time/step_s"] for row in steps)
    ideal_s = statistics.fmean(row["time/ideal_s"] for row in steps)
    hidden_frac = statistics.fmean(row["time/reward_hidden_frac"] for row in steps)
    return {"step_s": step_s, "ideal_s": ideal_s, "ratio": step_s / ideal_s, "hidden_frac": hidden_frac}


def judged(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Passed: each mode's steps, over all seeds, take at most 1.05 of the ideal, and staleness is within noise."""
    times = {}
    for name, found in runs.items():
        mean = {key: statistics.fmean(run["times"][key] for run in found) for key in found[0]["times"]}
        times[name] = mean | {"ratio": mean["step_s"] / mean["ideal_s"]}
    verdict = compared(runs["one_step_off"], runs["synchronous"])
    fast = all(time["ratio"] <= LARGEST_RATIO for time in times.values())
    return {"times": times, "staleness": verdict, "passed": fast and verdict["within_noise"]}


def report(
    runs: Mapping[str, Sequence[Run]], judgement: Mapping[str, Any], made: Mapping[str, str], overrides: Sequence[str]
) -> list[str]:
    """The result as Markdown."""
    seeds = f"{len(runs['synchronous'])} seeds, {len(runs['pipeline'])} of the pipelines"
    changed = f" with {' '.join(overrides)}" if overrides else ""
    lines = [
        "# Slow rewards",
        "",
        f"Made by `examples/slow_reward/compare.py`, commit {made['commit']}, {made['machine']}, {seeds}{changed}.",
        "Rewards take 0.25 to 10 s; the ideal is the replay of the same steps without any loss.",
        "",
        "| mode | s/step | ideal | over ideal | share of the rewards' time that was hidden |",
        "|---|---|---|---|---|",
    ]
    for name, time in judgement["times"].items():
        numbers = f"{time['step_s']:.2f} | {time['ideal_s']:.2f} | {time['ratio']:.3f} | {time['hidden_frac']:.2f}"
        lines.append(f"| {TITLES[name]} | {numbers} |")
    curves = {name: runs[name] for name in CURVES}
    lines += ["", "![Held-out accuracy by step](slow_reward.svg)", ""]
    lines += ["Held-out accuracy (greedy), mean over seeds:", "", *table(curves, TITLES), ""]
    return [*lines, sentence("one step off-policy - synchronous", judgement["staleness"])]


def run(name: str, seed: int, overrides: Sequence[str], ci: bool) -> Run:
    """One of them, trained unless it was."""
    files = [HERE / "config.yaml", *([HERE / "ci.yaml"] if ci else [])]
    plugins = ["--plugin", "reward_loop", *(["--plugin", "null"] if ci else [])]
    settings = [*plugins, *MODES[name], "eval.every_steps=2", *overrides, f"train.seed={seed}"]
    directory = (RUNS_DIR / "ci" if ci else RUNS_DIR) / f"{name}_{seed}"
    found = trained(directory, files, settings, f"{TITLES[name]}, seed {seed}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {**found, "times": timed(rows)}


def main() -> None:
    """Run what is missing, compare, print one JSON line."""
    parser = arguments(__doc__)
    parser.add_argument("--ci", action="store_true", help="a policy without torch, two steps")
    options = parser.parse_args()
    server = serve(PORT, 0.25, 10.0, 0.01)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        runs = {
            name: [run(name, seed, options.overrides, options.ci) for seed in range(options.seeds if curve else 1)]
            for name, curve in ((name, name in CURVES) for name in MODES)
        }
    finally:
        server.shutdown()
        server.server_close()
    judgement, made = judged(runs), facts()
    print(json.dumps({"name": "slow_reward", **judgement, **made}))
    if options.out:
        record = {"runs": runs, **judgement, **made, "overrides": options.overrides}
        write(options.out, record, report(runs, judgement, made, options.overrides))


if __name__ == "__main__":
    main()
