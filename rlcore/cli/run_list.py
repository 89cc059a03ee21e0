"""`rlcore runs`: lists runs with state, step, last metrics and disk; removes starts without results."""

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer, complain
from rlcore.errors import ConfigError, RlcoreError, describe
from rlcore.report.metrics import METRICS, has_results, read
from rlcore.report.status import LOCK, RUNNING, is_held, read_status

SHOWN = {"reward/mean": "reward", "completion/length_mean": "length"}
"""Metrics of the last step that the list shows, with their headings."""
NOT_BEGUN = "not begun"


@dataclass(frozen=True)
class RunRow:
    """One run."""

    name: str
    path: str
    state: str
    """running, finished, stopped, failed, killed, or not begun: no step, evaluation or checkpoint, and no other
    sign of one."""
    step: int
    steps: int
    """The last step of the run; 0: unknown."""
    metrics: dict[str, float]
    """The metrics of the last record that has them."""
    evaluation: dict[str, float]
    """Mean rewards on held-out prompts in the last evaluation."""
    disk_bytes: int
    changed: float
    """Time when metrics or log last changed, in seconds since 1970."""


def run(arguments: Sequence[str]) -> int:
    """Print the list, the newest run last; with --prune-failed remove the starts without results first."""
    parser = Parser("runs", "List the runs below a directory: state, step, last metrics, disk.")
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), help="train.dir; default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--prune-failed",
        action="store_true",
        help="remove failed starts: no step, no evaluation, no checkpoint, and no process that uses them",
    )
    parsed = parser.parse(arguments)
    rows = list_runs(parsed.directory)
    if parsed.prune_failed:
        for row in rows:
            if row.state == NOT_BEGUN and not is_held(Path(row.path)):
                shutil.rmtree(row.path)
                answer(f"removed {row.path}")
        rows = [row for row in rows if row.state != NOT_BEGUN]
    if parsed.json:
        answer(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        _show(rows)
    return 0


def list_runs(directory: Path) -> list[RunRow]:
    """The runs in the directory, sorted by their last change; ConfigError if the directory does not exist."""
    if not directory.is_dir():
        raise ConfigError(f"runs: found no directory '{directory}'; name the train.dir of your runs")
    rows = []
    for path in directory.iterdir():
        try:
            if not path.is_symlink() and _is_run(path):
                rows.append(_row(path))
        except PermissionError as cause:  # a run of another user
            complain(f"rlcore: runs: '{path}' is left out: {describe(cause)}")
    return sorted(rows, key=lambda row: row.changed)


def _is_run(path: Path) -> bool:
    return path.is_dir() and (path / LOCK).is_file()


def _row(path: Path) -> RunRow:
    records = []
    with suppress(RlcoreError):  # the list shows a run with a damaged line, too
        records = read(path)
    last = {name: value for record in records for name, value in record.items()}
    step = max((int(record["step"]) for record in records), default=0)
    state, steps = _state(path, step)
    return RunRow(
        name=path.name,
        path=str(path),
        state=state,
        step=step,
        steps=steps,
        metrics={name: last[name] for name in SHOWN if name in last and math.isfinite(last[name])},
        evaluation={
            name.removeprefix("eval/").removesuffix("/mean"): value
            for name, value in last.items()
            if name.startswith("eval/") and name.endswith("/mean") and math.isfinite(value)
        },
        disk_bytes=_disk_bytes(path),
        changed=max(_changed(path / name) for name in (".", METRICS, "log.txt")),
    )


def _state(path: Path, step: int) -> tuple[str, int]:
    """(state, last step of the run)."""
    known = None
    with suppress(RlcoreError):
        known = read_status(path)
    steps = known[0].steps if known else 0
    if is_held(path):
        return RUNNING, steps
    if step == 0 and not has_results(path):
        from rlcore.train.origin import remains_of

        if not any(remains_of(path)):  # a run whose results are on a volume that is not mounted has begun
            return NOT_BEGUN, steps
    if known is None:
        return "unknown", steps
    return ("killed" if known[0].state == RUNNING else known[0].state), steps


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _disk_bytes(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # a run in progress removes files
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def _show(rows: Sequence[RunRow]) -> None:
    from rlcore.cli.console import stdout, table
    from rlcore.report.standing import duration

    lines = [
        (
            row.name,
            row.state,
            f"{row.step}/{row.steps}" if row.steps else str(row.step),
            *(f"{row.metrics[name]:.4g}" if name in row.metrics else "-" for name in SHOWN),
            ", ".join(f"{name} {value:.3f}" for name, value in row.evaluation.items()) or "-",
            f"{row.disk_bytes / 2**20:.1f} MiB",
            f"{duration(time.time() - row.changed)} ago",
        )
        for row in rows
    ]
    headings = ("run", "state", "step", *SHOWN.values(), "held out", "disk", "changed")
    stdout().print(table("runs", headings, lines))
