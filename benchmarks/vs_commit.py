"""Compares this checkout of rlcore with another: training steps and the controller's overhead, A B A B.

    git worktree add ../before COMMIT && make -C ../before setup
    .venv/bin/python benchmarks/vs_commit.py ../before [--scenario E1] [--rounds 3] [--smoke]

Both run their own programs (`rlcore_side.py`, `overhead.py`) in their own environments, with the same configuration.
Prints one JSON line per scenario on stdout. A ratio is the median of the other over ours: above 1 if ours is faster.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from channel import Side
from measure import ROOT, emit, machine, peak_rss_of_tree, say, summary, versions_in
from scenarios import SCENARIOS, parser_of, sized
from tiny_task import write_tiny_task
from vs_trl import Comparison, warm

TIMES = ("step_s", "generate_s", "update_s")
OVERHEAD_S = 900.0


def steps(comparison: Comparison, other: Path, rounds: int) -> dict[str, Any]:
    """Take steps of both checkouts in turns; returns times, peak memory and the ratios of medians."""
    times: dict[str, list[dict[str, Any]]] = {"other": [], "ours": []}
    with ExitStack() as stack:
        sides = {}
        for name, root in (("other", other), ("ours", ROOT)):
            programs = root / "benchmarks"
            spec = comparison.our_spec(programs)
            side = Side(name, python_of(root), programs / "rlcore_side.py", spec, comparison.threads)
            sides[name] = stack.enter_context(side)
            comparison.ready(side)
            warm(comparison, side, 8)
        for _ in range(rounds):
            for name, side in sides.items():
                times[name].append(comparison.step(side))
        memory = {name: peak_rss_of_tree(side.pid) for name, side in sides.items()}
    medians = {name: {key: summary([row[key] for row in rows]) for key in TIMES} for name, rows in times.items()}
    return {
        "scenario": comparison.scenario.facts(),
        **medians,
        "ratio": {key: medians["other"][key]["median"] / medians["ours"][key]["median"] for key in TIMES},
        "peak_rss_bytes": memory,
    }


def overhead(other: Path, rounds: int, smoke: bool) -> dict[str, Any]:
    """The controller's seconds per sample of both checkouts, by samples per step, from `overhead.py` in turns."""
    found: dict[str, list[dict[str, float]]] = {"other": [], "ours": []}
    for _ in range(rounds):
        for name, root in (("other", other), ("ours", ROOT)):
            call = [str(python_of(root)), str(root / "benchmarks" / "overhead.py"), *(["--smoke"] if smoke else [])]
            done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True, timeout=OVERHEAD_S, cwd=root)
            found[name].append(json.loads(done.stdout.splitlines()[-1])["s_per_sample"]["controller"])
            say(f"controller of {name}: {found[name][-1]} s per sample")
    medians = {
        name: {samples: summary([row[samples] for row in rows]) for samples in rows[0]} for name, rows in found.items()
    }
    ratio = {key: medians["other"][key]["median"] / medians["ours"][key]["median"] for key in medians["ours"]}
    return {"controller_s_per_sample": {**medians, "ratio": ratio}}


def python_of(root: Path) -> Path:
    """The interpreter of a checkout. SystemExit if it has none."""
    python = root / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"vs_commit: found no environment in '{root}'; `make -C {root} setup` creates {python}")
    return python


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the steps of each chosen scenario, then the controllers."""
    parser = parser_of(__doc__)
    parser.add_argument("other", type=Path, help="the other checkout, with its environment in .venv")
    parser.add_argument("--overhead-rounds", type=int, default=2, help="runs of overhead.py of each; 0: none")
    options: argparse.Namespace = parser.parse_args(arguments)
    other, model = options.other.resolve(), options.model.resolve()
    python_of(other)
    facts = machine(options.threads) | {"other": commit_of(other), "other_versions": versions_in(python_of(other))}
    with tempfile.TemporaryDirectory(prefix="vs-commit-") as scratch:
        directory = Path(scratch)
        os.chdir(directory)  # a child started by `python -m` imports from here first: neither checkout is here
        model = write_tiny_task(directory / "tiny") if options.smoke else model
        if not (model / "config.json").exists():
            raise SystemExit(f"vs_commit: found no model in '{model}'; `make model` writes it")
        for name in options.scenario or list(SCENARIOS):
            comparison = Comparison(sized(SCENARIOS[name], options), model, options, directory)
            emit("vs_commit", steps(comparison, other, options.rounds or comparison.scenario.rounds), facts)
        if options.overhead_rounds:
            emit("vs_commit", overhead(other, options.overhead_rounds, options.smoke), facts)


def commit_of(root: Path) -> str:
    """The commit of a checkout."""
    call = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()


if __name__ == "__main__":
    main()
