"""Environments and limits in which `rlcore train` is started: the run is trained to its end, or refused in one line."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.testing import write_prompts
from rlcore.train import train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


def config_of(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """The configuration of two steps with a reward in a child."""
    (tmp_path / "reward.py").write_text("def half(completions):\n    return [0.5] * len(completions)\n")
    return {
        "model": {"path": "none", "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 8},
        "actor": {"backend": "null"},
        "reward": {"functions": {"half": {"fn": f"{tmp_path / 'reward.py'}:half", "children": 1}}},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run", **settings},
        "plugins": {"null": {}},
    }


def started(
    tmp_path: Path,
    environment: dict[str, str],
    before: Callable[[], object] | None = None,
    without: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[bytes]:
    """A run by the command line."""
    (tmp_path / "config.json").write_text(json.dumps(config_of(tmp_path, log_completions_every=1)))
    command = [str(Path(sys.executable).parent / "rlcore"), "train", str(tmp_path / "config.json")]
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    environment = {**inherited, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, timeout=200, preexec_fn=before, check=False
    )


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "locale C and ASCII, one column, no home, variables of ours": {
        **{"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
        **{"COLUMNS": "1", "LINES": "-5"},
        **{"HOME": "/nope", "XDG_CACHE_HOME": "/proc/x"},
        **{"RLCORE_CHILD_OF": "x", "RLCORE_REWARD_TOKEN": "x"},
    },
    "a locale that does not exist, an odd terminal, no directory for temporary files, variables that are not text": {
        "LC_ALL": "xx_YY.nope",
        **{"TERM": "\x1b[31m", "COLORTERM": "x", "FORCE_COLOR": "1", "COLUMNS": "0"},
        **{"TMPDIR": "/nope/x", "TEMP": "/nope", "TMP": "/nope"},
        "A" * 1000: "\udcff\udcfe" * 100,
    },
    "columns of 5000 digits, debugging": {
        **{"COLUMNS": "9" * 5000, "LINES": "x"},
        **{"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONASYNCIODEBUG": "1"},
    },
    "a billion columns, no docstrings and asserts": {"COLUMNS": "999999999", "PYTHONOPTIMIZE": "2"},
}
"""Variables that do not touch one another share a run, whose start takes most of its time."""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_run_in_an_odd_environment_is_trained_to_its_end(name: str, tmp_path: Path) -> None:
    done = started(tmp_path, ENVIRONMENTS[name])
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"Traceback" not in done.stderr
    assert "every step was taken: 2" in (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]


def test_a_run_without_most_variables_is_trained_to_its_end(tmp_path: Path) -> None:
    done = started(tmp_path, {}, without=("HOME", "PATH", "USER", "LOGNAME", "LANG", "PWD"))
    assert done.returncode == 0, done.stderr[-2000:]


def limit(kind: int, number: int) -> Callable[[], object]:
    """Sets a limit of the process."""
    return lambda: resource.setrlimit(kind, (number, number))


def with_umask_stack_and_session() -> None:
    os.umask(0)
    limit(resource.RLIMIT_STACK, 256 << 10)()
    os.setsid()


def with_descriptors_and_blocked_signals() -> None:
    limit(resource.RLIMIT_NOFILE, 64)()
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def with_ignored_signals() -> None:
    for name in ("SIGCHLD", "SIGINT", "SIGQUIT", "SIGPIPE", "SIGALRM", "SIGTERM"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)


STARTS: dict[str, Callable[[], object]] = {
    "umask 0, a small stack, its own session": with_umask_stack_and_session,
    "64 descriptors, signals blocked": with_descriptors_and_blocked_signals,
    "children and signals ignored": with_ignored_signals,
}


@pytest.mark.parametrize("name", STARTS)
def test_a_run_that_is_started_oddly_is_trained_to_its_end(name: str, tmp_path: Path) -> None:
    done = started(tmp_path, {}, STARTS[name])
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"Traceback" not in done.stderr
    assert "every step was taken: 2" in (tmp_path / "run" / "log.txt").read_text().splitlines()[-1]


REFUSED: dict[str, Callable[[], object]] = {
    "20 descriptors": limit(resource.RLIMIT_NOFILE, 20),
    "files of 2000 bytes": limit(resource.RLIMIT_FSIZE, 2000),
    "300 MB of addresses": limit(resource.RLIMIT_AS, 300_000_000),
    "60 MB of addresses": limit(resource.RLIMIT_AS, 60_000_000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_cannot_be_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    done = started(tmp_path, {}, REFUSED[name])
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(b"rlcore: ")
    if "addresses" in name:
        assert done.stderr.startswith(b"rlcore: not enough memory")
        assert len(done.stderr.splitlines()) == 1


def test_a_clock_that_jumps_changes_no_weight_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steady").mkdir()
    (tmp_path / "jumping").mkdir()
    steady = train(config_of(tmp_path / "steady"), plugins=["null"]).run_dir
    years, now = [0], time.time

    def jumping() -> float:
        years[0] += 1
        return now() + (-1) ** years[0] * years[0] * 1e5

    monkeypatch.setattr(time, "time", jumping)
    jumped = train(config_of(tmp_path / "jumping"), plugins=["null"]).run_dir
    assert years[0] > 2
    names = [path.relative_to(steady) for path in sorted(steady.glob("checkpoints/step_2/**/*.npy"))]
    assert names
    for name in names:
        assert (jumped / name).read_bytes() == (steady / name).read_bytes()
