"""`rlcore where`: describes the current activity of a run in a sentence."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.console import answer, complain
from rlcore.errors import ConfigError, RlcoreError, counted
from rlcore.report.metrics import way_on
from rlcore.report.standing import duration, sentence
from rlcore.report.status import FAILED, FINISHED, LOCK, RUNNING, STATUS, Status, is_held, read_status

DAMAGED = 2


def run(arguments: Sequence[str]) -> int:
    """Print a line per run; 2 if the status of one cannot be read."""
    parser = Parser("where", "Show where runs are: the step, what its samples wait for, and which workers are busy.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories, or their parent directories"
    )
    parser.add_argument("--json", action="store_true", help="print status.json of each run, with its ending")
    parsed = parser.parse(arguments)
    found = [run_dir for path in parsed.runs for run_dir in _runs_of(path)]
    code = 0
    for run_dir in found:
        try:
            _answer(run_dir, parsed.json, "" if len(found) == 1 else f"{run_dir.name}: ")
        except RlcoreError as error:  # a damaged status is that of one run
            complain(f"rlcore: {error}")
            code = DAMAGED
    return code


def _answer(run_dir: Path, as_json: bool, prefix: str) -> None:
    if as_json:
        answer(json.dumps({"run": str(run_dir), **_described(run_dir)}))
    else:
        answer(f"{prefix}{_where(run_dir)}")


def _runs_of(path: Path) -> list[Path]:
    """The run of a checkpoint, the directory if it is a run's, else the runs in it; ConfigError without any."""
    full = path.expanduser().absolute()
    for place in full.parents[:2]:
        if (place / LOCK).exists() and full.relative_to(place).parts[0] == "checkpoints":
            return [place]
    if _is_run(path):
        return [path]
    found = sorted(inner for inner in path.glob("*") if _is_run(inner)) if path.is_dir() else []
    if not found:
        what = "there is no such directory" if not path.is_dir() else f"no {STATUS} and no config.yaml is in it"
        raise ConfigError(f"where: '{path}': {what}; needs the directory of a run, such as runs/NAME")
    return found


def _is_run(path: Path) -> bool:
    return path.is_dir() and ((path / STATUS).exists() or (path / "config.yaml").exists())


def _described(run_dir: Path) -> dict[str, object]:
    """The run's status as JSON; `state` is `killed` if the process of a running one is gone."""
    known = read_status(run_dir)
    if known is None:
        return {"state": "starting" if is_held(run_dir) else "unknown"}
    status, written = known
    state = "killed" if status.state == RUNNING and not is_held(run_dir) else status.state
    return {**asdict(status), "written": written, "state": state}


def _where(run_dir: Path) -> str:
    """The sentence about a run, also if it has ended."""
    held, known, now = is_held(run_dir), read_status(run_dir), time.time()
    if known is None:
        return "starting" if held else f"no process trains in it, and it has no {STATUS}"
    status, written = known
    ago = f"{duration(now - written)} ago"
    if held:
        return sentence(status, now) if status.state == RUNNING else "starting again"
    if status.state == FINISHED:
        return f"finished {ago} after {counted(status.steps, 'step')}"
    if status.state == RUNNING:
        return _killed(run_dir, status, written, ago)
    ended = "failed" if status.state == FAILED else "stopped"
    place = f"in step {status.step}" if status.step else "before its first step"
    return f"{ended} {ago} {place}: {status.problem}"


def _killed(run_dir: Path, status: Status, written: float, ago: str) -> str:
    """The sentence about a run whose process is gone, or is on a machine whose locks are not visible here."""
    last = f"the last that it wrote, {ago}: {sentence(status, written)}"
    if status.host != socket.gethostname():
        return f"not seen from this machine: process {status.pid} of '{status.host}'; {last}"
    return f"killed: process {status.pid} is gone; {last}; {way_on(run_dir)}"
