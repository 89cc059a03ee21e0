"""Shared by scripts of the examples: train a run once, read its curve of held-out accuracy, compare curves.

Uses only Python's standard library: training is a separate process, `python -m rlcore train`.
"""

import argparse
import json
import math
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.05
"""Mean paired difference of two areas up to which they are equal within noise."""
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Two-sided 95 % quantiles by degrees of freedom."""

Run = dict[str, Any]
"""Of one run: curve {step: held-out accuracy}, step_s (median), explained_variance (of the critic, by step), wall_s
(seconds from the start of the process to its end, None where they were not taken)."""
WALL_FILE = "wall_s.json"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that the scripts which compare runs share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="overrides of every run")
    return parser


def trained(directory: Path, files: Sequence[Path], settings: Sequence[str], title: str) -> Run:
    """Train in `directory` unless done. A run that was stopped there continues after its newest checkpoint, and starts
    over without one. Leaves no checkpoint at the end.

    SystemExit if the run there had other settings, or fails.
    """
    done = directory / "done.json"
    if done.exists() and json.loads(done.read_text()) != list(settings):
        sys.exit(f"{directory} was run with other settings, {done.read_text()}; remove it")
    if not done.exists():
        command = [sys.executable, "-m", "rlcore", "train", *map(str, files), *settings]
        command += [f"train.dir={directory.parent}", f"train.name={directory.name}", "checkpoint.at_end=false"]
        print(title, file=sys.stderr, flush=True)
        if directory.exists():
            command += ["--resume", "--from-start"]
        began, wall = time.monotonic(), directory / WALL_FILE
        if status := ended(command):
            sys.exit(f"{title}: {shlex.join(command)} ended with {status}; call this script again to continue")
        # The time of a resumed run before the stop is unknown.
        wall.write_text(json.dumps(None if "--resume" in command else round(time.monotonic() - began, 1)))
        done.write_text(json.dumps(list(settings)))
    return read(directory)


def ended(command: Sequence[str]) -> int:
    """The exit code of a run."""
    with subprocess.Popen(command, stdout=sys.stderr) as process, ending_first(process):
        return process.wait()


@contextmanager
def ending_first(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the process, which may save, and not this one, as `subprocess.run` does.

    Ctrl-C reaches both; SIGTERM is passed on.
    """
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def read(directory: Path) -> Run:
    """The metrics of a run."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    wall = directory / WALL_FILE
    return {
        "curve": {row["step"]: row["eval/heldout/mean"] for row in rows if "eval/heldout/mean" in row},
        "step_s": statistics.median(row["time/step_s"] for row in rows if "time/step_s" in row),
        "explained_variance": [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row],
        "wall_s": json.loads(wall.read_text()) if wall.exists() else None,
    }


def area(curve: Mapping[int, float]) -> float:
    """The mean height of the curve over its steps, by trapezoids."""
    steps = sorted(curve)
    total = sum((b - a) * (curve[a] + curve[b]) / 2 for a, b in pairwise(steps))
    return total / (steps[-1] - steps[0])


def end(runs: Sequence[Run]) -> float:
    """The height at the last step, mean over runs."""
    return statistics.fmean(run["curve"][max(run["curve"])] for run in runs)


def compared(one: Sequence[Run], other: Sequence[Run]) -> dict[str, Any]:
    """The mean paired difference of areas, its 95 % interval (None of one seed), and whether it is within noise."""
    differences = [area(a["curve"]) - area(b["curve"]) for a, b in zip(one, other, strict=True)]
    mean, interval = statistics.fmean(differences), None
    if len(differences) > 1:
        half = STUDENT_T[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
        interval = [mean - half, mean + half]
    return {"difference": mean, "interval_95": interval, "within_noise": abs(mean) <= LIMIT}


def table(runs: Mapping[str, Sequence[Run]], titles: Mapping[str, str]) -> list[str]:
    """Lines of Markdown: a row for each step, means over seeds, the median seconds of a step, and minutes of a run."""
    lines = [f"| step | {' | '.join(titles[name] for name in runs)} |", f"|---|{'---|' * len(runs)}"]
    for step in sorted(next(iter(runs.values()))[0]["curve"]):
        means = (statistics.fmean(seed_run["curve"][step] for seed_run in found) for found in runs.values())
        lines.append(f"| {step} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    seconds = (statistics.median(seed_run["step_s"] for seed_run in found) for found in runs.values())
    lines.append(f"| s/step | {' | '.join(f'{duration:.1f}' for duration in seconds)} |")
    walls = [[seed_run.get("wall_s") for seed_run in found] for found in runs.values()]
    if all(None not in found for found in walls):
        lines.append(f"| min/run | {' | '.join(f'{statistics.median(found) / 60:.1f}' for found in walls)} |")
    return lines


def sentence(title: str, verdict: Mapping[str, Any]) -> str:
    """A comparison of areas in words."""
    spread = "one seed, so no interval"
    if verdict["interval_95"] is not None:
        low, high = verdict["interval_95"]
        spread = f"95 % [{low:+.4f}, {high:+.4f}]"
    within = "within noise" if verdict["within_noise"] else "not within noise"
    return f"Area, {title}: {verdict['difference']:+.4f}, {spread}: {within}."


def facts() -> dict[str, str]:
    """The commit and the machine."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit or "unknown", "machine": f"{platform.machine()} {platform.system()}"}


def write(out: Path, record: Mapping[str, Any], lines: Sequence[str]) -> None:
    """OUT.json and OUT.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
