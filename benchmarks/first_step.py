"""Measures the seconds from an empty directory to the first step of a new task, part by part, as JSON lines.

    .venv/bin/python benchmarks/first_step.py [--model DIRECTORY] [--out FILE.json]

Each run is the three-key command with small settings, in a child process. One run is on the policy without torch; with
`--model`, another is on that model. A part has wall-clock seconds, and CPU seconds of the run and all its processes. On
a shared machine, only the latter show the cost of a part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from first_contact import FILES, ROWS
from measure import ROOT

SIZE = (
    "train.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_tokens=16", "train.max_steps=1",
    "eval.sources.held.path=held.jsonl", "data.sources.train.path=train.jsonl", "reward.functions.ok.fn=rew.py:ok",
    "train.name=first",
)  # fmt: skip
NULL = ("model.path=none", "model.tokenizer=bytes", "actor.backend=null", "rollout.backend=null")
PROGRAM = """
import sys
def lap(part): print('PART', part, flush=True)
lap('Python')
import rlcore.cli
from rlcore.plugins.planning import plan_run
lap('import of what plans')
plan = plan_run([], sys.argv[2:], sys.argv[1].split(',') if sys.argv[1] else [])
lap('plan')
from rlcore.train import run_training
lap('import of torch and of what trains')
run_training(plan)
"""
LINES = (
    ("evaluating", "start of workers, model"),
    ("step 0  ", "baseline evaluation"),
    ("updating on", "first samples and rewards"),
    ("step 1/1", "first update"),
)
"""Words of lines that the run prints, and the part that ends with each."""


def parts(plugins: str, settings: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The parts up to the first step of a run in an empty directory."""
    with tempfile.TemporaryDirectory(prefix="first-step-") as place:
        for name, text in {**FILES, "held.jsonl": ROWS.replace("Reverse ", "Turn around ")}.items():
            (Path(place) / name).write_text(text, "utf-8")
        began, used = time.monotonic(), 0.0
        command = [sys.executable, "-u", "-c", PROGRAM, plugins, *settings, *SIZE]
        log = Path(place) / "runs/first/log.txt"
        child = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if child.stdout is None:
            raise RuntimeError("the child has no standard output")
        os.set_blocking(child.stdout.fileno(), False)
        printed, ends = "", [(f"PART {part}\n", part) for part in _own_parts()] + list(LINES)
        while ends and child.poll() is None:
            printed += (child.stdout.read() or b"").decode("utf-8", "replace")
            text = printed + (log.read_text("utf-8") if log.exists() else "")
            if ends[0][0] in text:
                now, cpu = time.monotonic(), cpu_seconds(child.pid)
                yield {"part": ends.pop(0)[1], "seconds": round(now - began, 2), "cpu_seconds": round(cpu - used, 2)}
                began, used = now, cpu
            else:
                time.sleep(0.01)
        if ends:
            sys.exit(f"the run ended before its first step:\n{printed}")
        child.terminate()
        child.communicate()


def _own_parts() -> list[str]:
    return [line.split("'")[1] for line in PROGRAM.splitlines() if line.startswith("lap(")]


def cpu_seconds(pid: int) -> float:
    """CPU seconds of the process, its living descendants and those that have ended."""
    ticks = 0
    for directory in [pid, *_descendants(pid)]:
        try:
            fields = Path(f"/proc/{directory}/stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = listed.read_text("utf-8").split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def main() -> None:
    """Print the parts of each run, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, help=f"such as {ROOT.name}/docs/results/first_step.json")
    options = parser.parse_args()
    runs = {"null": ("null", NULL)}
    if options.model is not None:
        runs[options.model.name] = ("", (f"model.path={options.model.resolve()}",))
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (plugins, settings) in runs.items():
        load = os.getloadavg()[0]
        found[name] = []
        for part in parts(plugins, settings):
            found[name].append(part)
            print(json.dumps({"run": name, **part, "load_before": round(load, 1)}), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
