"""Compares runs bit for bit, to test that a resumed run equals an uninterrupted one."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.testing.prompts import write_prompts
from rlcore.types import Metrics

CLOCK = "time/"
"""Prefix of metrics that a clock measures. They differ between any two runs, so comparisons leave them out."""
VARYING_KEYS = frozenset({"latency_s", "timing"})
"""Keys of records, other than metrics, whose values a clock measures."""

VARYING_ENDS = (
    "/in_flight_max",
    "/concurrency",
    "/num_retries",
    "/num_cache_hits",
    "/num_ejections",
    "/num_restarts",
    "/ejected",
)
"""Suffixes of metrics that describe calls of rewards instead of their scores."""


def untimed(metrics: Metrics) -> Metrics:
    """The metrics without those that depend on the clock."""
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCK)}


def run_settings(directory: Path, num_prompts: int, **more: Any) -> dict[str, Any]:
    """Overrides of a short run below `directory`, by dotted key. Writes its file of prompts. `more` takes precedence.

    By default the run is on the null backend, whose plugin must be enabled.
    """
    return {
        "model.path": "none",
        "model.tokenizer": "bytes",
        "data.sources.all.path": str(write_prompts(directory / "prompts.jsonl", num_prompts, "say a, {index}")),
        "actor.backend": "null",
        "rollout.backend": "null",
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 8,
        "reward.functions.letters.fn": "count_letter",
        "reward.functions.letters.children": 1,  # starting a process takes longer than a step
        "train.dir": str(directory / "runs"),
        "train.max_steps": 2,
        "train.prompts_per_step": 2,
        **more,
    }


def differing(one: Path, other: Path) -> list[str]:
    """Differences of two runs, one line each: metrics except times, trajectories, tokens, files of the last checkpoint.

    Empty when they are equal bit for bit.
    """
    lines = list(_differing_lines(one / "metrics.jsonl", other / "metrics.jsonl"))
    names = {path.name for run in (one, other) for path in (run / "trajectories").iterdir()}
    for name in sorted(names):
        lines += _differing_lines(one / "trajectories" / name, other / "trajectories" / name)
    return [*lines, *_differing_tokens(one, other), *_differing_checkpoints(one, other)]


def _differing_lines(one: Path, other: Path) -> Iterator[str]:
    if not (one.exists() and other.exists()):
        yield f"{one.name}: exists in one run only"
        return
    rows = [[_stable(json.loads(line)) for line in _whole_lines(path)] for path in (one, other)]
    if len(rows[0]) != len(rows[1]):
        yield f"{one.name}: {len(rows[0])} lines and {len(rows[1])}"
    for number, (left, right) in enumerate(zip(*rows, strict=False), 1):
        keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
        if keys:
            yield f"{one.name}, line {number}: {keys}"


def _differing_tokens(one: Path, other: Path) -> Iterator[str]:
    names = {path.name for run in (one, other) for path in (run / "tokens").glob("*.safetensors")}
    for name in sorted(names):
        files = [run / "tokens" / name for run in (one, other)]
        if not all(file.exists() for file in files):
            yield f"tokens/{name}: exists in one run only"
        elif files[0].read_bytes() != files[1].read_bytes():
            yield f"tokens/{name}"


def _whole_lines(path: Path) -> list[bytes]:
    """Lines that end in a line feed. A last line without one is left out, because a crash may have cut it."""
    with path.open("rb") as file:
        return [line for line in file if line.endswith(b"\n")]


def _stable(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _stable(value) if isinstance(value, dict) else value
        for key, value in row.items()
        if not key.startswith(CLOCK) and key not in VARYING_KEYS and not key.endswith(VARYING_ENDS)
    }


def _differing_checkpoints(one: Path, other: Path) -> Iterator[str]:
    paths = [(run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()) for run in (one, other)]
    if paths[0].name != paths[1].name:
        yield f"last checkpoint: {paths[0].name} and {paths[1].name}"
        return
    digests = [dict(_digests(path)) for path in paths]
    for name in sorted(digests[0].keys() | digests[1].keys()):
        if digests[0].get(name) != digests[1].get(name):
            yield f"{paths[0].name}/{name}"


def _digests(path: Path) -> Iterator[tuple[str, str]]:
    """(file, SHA-256), and for the state its parsed content.

    The manifest is left out because it repeats the digests, configuration and plan because they name the run.
    """
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if name == "state.json":
            yield name, json.dumps(_stable(json.loads(file.read_text())), sort_keys=True)
        elif file.is_file() and name not in ("manifest.json", "config.yaml", "plan.json"):
            yield name, hashlib.sha256(file.read_bytes()).hexdigest()
