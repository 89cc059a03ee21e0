"""status.json and the sentence of `rlcore where`: what a current run is doing, and how a run ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.contracts.activity import (
    CALL,
    ENVIRONMENT,
    REWARD,
    TOOL,
    Activity,
    BegunWork,
    SampleCounts,
    current_activity,
)
from rlcore.errors import ConfigError
from rlcore.report.standing import duration, sentence
from rlcore.report.status import LOCK, STATUS, Status, StatusWriter, read_status, status_of, write_status
from rlcore.testing.runs import run_settings
from rlcore.types import TrajectoryId

FIRST = TrajectoryId("p/0", 0, 0)


class Named:
    """A replica."""

    def __init__(self, name: str) -> None:
        self.name = name


class Replicas:
    """A group of replicas."""

    def __init__(self, *names: str) -> None:
        self.replicas = tuple(map(Named, names))


def working() -> Activity:
    """A run in step 12: 3 of 64 samples wait for their judge, and a worker of two is busy."""
    activity = Activity()
    activity.total_steps = 200
    activity.begin_step(12)
    activity.enter("scoring")
    activity.counts = lambda: SampleCounts(64, 64, 61)
    activity.groups |= {"actor": Replicas("actor"), "rollout": Replicas("rollout 0", "rollout 1")}  # type: ignore[dict-item]
    for sample in range(3):
        activity.begin(REWARD, "judge", sample=replace(FIRST, sample=sample))
    activity.begin(CALL, "rollout 1", "generate")
    return activity


def test_the_sentence_says_what_samples_wait_for_since_when_and_who_is_idle() -> None:
    status = status_of(working(), began=time.time())
    text = sentence(status, time.time() + 41)
    assert text == (
        "step 12 of 200: scoring for 41 s; 3 of 64 samples wait for reward judge, the oldest for 41 s; actor idle; "
        "rollout generate() on 1 of 2 replicas for 41 s"
    )


def test_work_that_has_ended_is_not_shown_and_the_oldest_counts() -> None:
    activity = Activity()
    first = activity.begin(TOOL, "search", sample=FIRST)
    activity.begin(TOOL, "search", sample=FIRST, num=4)
    assert [(waiting.who, waiting.samples) for waiting in status_of(activity, 0.0).waiting] == [("search", 5)]
    activity.end(first)
    assert [(waiting.who, waiting.samples) for waiting in status_of(activity, 0.0).waiting] == [("search", 4)]


def test_work_in_other_processes_counts_with_the_work_here_until_it_is_shown_no_more() -> None:
    activity, key = Activity(), Activity().new_key()
    activity.begin(ENVIRONMENT, "Game", "step", FIRST)
    elsewhere = [BegunWork(ENVIRONMENT, "Game", "", None, 3, 1.0), BegunWork(TOOL, "search", "", None, 2, 5.0)]
    activity.show_elsewhere(key, elsewhere)
    activity.counts = lambda: SampleCounts(64, 0, 0)
    waiting = status_of(activity, 0.0).waiting
    assert [(found.kind, found.who, found.samples) for found in waiting] == [
        ("environment", "Game", 4),
        ("tool", "search", 2),
    ]
    assert waiting[0].oldest == pytest.approx(1.0 + activity.unix_offset, abs=0.1)
    assert "; 4 of 64 samples wait for environment Game, the oldest for " in sentence(
        status_of(activity, 0.0), time.time()
    )
    activity.show_elsewhere(key, elsewhere[1:])
    assert [found.samples for found in status_of(activity, 0.0).waiting] == [1, 2]
    activity.show_elsewhere(key, ())
    assert [found.samples for found in status_of(activity, 0.0).waiting] == [1]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (41, "41 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    status = status_of(working(), began=time.time())
    write_status(tmp_path, status)
    found = read_status(tmp_path)
    assert found is not None
    assert found[0] == status
    assert found[1] == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2}',
        '{"schema": 1, "waiting": [], "roles": [], "written": 0}',
        '"\\ud800"',
        "[" * 9999,
    ],
)
def test_a_file_that_is_not_a_status_is_a_one_line_error(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUS).write_text(text)
    with pytest.raises(ConfigError, match=r"status\.json"):
        read_status(tmp_path)


def test_a_field_of_another_type_or_a_schema_of_the_future_is_an_error_and_a_new_field_is_none(tmp_path: Path) -> None:
    write_status(tmp_path, status_of(working(), began=time.time()))
    record = json.loads((tmp_path / STATUS).read_text())
    (tmp_path / STATUS).write_text(json.dumps(record | {"new": 1}))
    assert read_status(tmp_path) is not None
    (tmp_path / STATUS).write_text(json.dumps(record | {"schema": 2}))
    with pytest.raises(ConfigError, match="its schema is 2; this rlcore reads 1"):
        read_status(tmp_path)
    (tmp_path / STATUS).write_text(json.dumps(record | {"step": "12"}))
    with pytest.raises(ConfigError, match="step is '12'"):
        read_status(tmp_path)


@pytest.mark.parametrize("field", ["written", "phase_began", "step_s"])
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_an_error(tmp_path: Path, field: str, number: str) -> None:
    write_status(tmp_path, status_of(working(), began=time.time()))
    record = json.loads((tmp_path / STATUS).read_text())
    (tmp_path / STATUS).write_text(json.dumps(record | {field: "?"}).replace('"?"', number))
    with pytest.raises(ConfigError, match=r"it is not a status of a run: (ValueError|OverflowError)"):
        read_status(tmp_path)


def test_a_status_is_written_only_when_something_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.report.status.LOOK_S", 0.01)
    looks: list[Status] = []
    activity = working()
    with StatusWriter(tmp_path, activity, looks.append).running():
        wait_until(lambda: len(looks) > 5)
        before = (tmp_path / STATUS).stat().st_mtime_ns
        num_looks = len(looks)
        wait_until(lambda: len(looks) > num_looks + 5)
        assert (tmp_path / STATUS).stat().st_mtime_ns == before
        activity.updated += 1
        wait_until(lambda: (tmp_path / STATUS).stat().st_mtime_ns != before)


def test_a_full_disk_does_not_end_a_run_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlcore.report.status.LOOK_S", 0.01)
    looks: list[Status] = []
    with StatusWriter(tmp_path / "missing", Activity(), looks.append).running():
        wait_until(lambda: len(looks) > 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_end_of_a_run_is_written_into_the_status_of_before_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    writer = StatusWriter(tmp_path, Activity(), lambda status: None)
    write_status(tmp_path, replace(status_of(working(), began=0.0), problem="long " * 1000))
    monkeypatch.setattr(Path, "write_bytes", refuse)
    writer.end("failed", "no room")
    found = read_status(tmp_path)
    assert found is not None
    assert (found[0].state, found[0].problem) == ("failed", "no room")


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_has_the_name_of_the_temporary_file_is_replaced_and_not_written_to(tmp_path: Path, kind: str) -> None:
    (tmp_path / "precious").write_text("kept")
    temporary = tmp_path / f".{STATUS}.tmp"
    if kind == "link":
        temporary.symlink_to("precious")
    elif kind == "pipe":
        os.mkfifo(temporary)
    else:
        temporary.mkdir()
    looks: list[Status] = []
    with StatusWriter(tmp_path, Activity(), looks.append).running():
        wait_until(lambda: len(looks) > 1)
    assert (tmp_path / "precious").read_text() == "kept"
    if kind != "directory":
        assert not (tmp_path / STATUS).is_symlink()
        assert read_status(tmp_path) is not None


def test_outside_a_run_work_is_not_recorded() -> None:
    activity = current_activity()
    activity.end(activity.begin(REWARD, "judge"))
    assert activity.take().spans() == []


SLOW_REWARD = """
import asyncio

async def judge(trajectory):
    await asyncio.sleep({seconds})
    return 1.0
"""


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for it, and fail after some time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def begun(directory: Path, seconds: float, **more: object) -> Iterator[subprocess.Popen[bytes]]:
    """A run of the null model whose samples wait for their reward."""
    directory.mkdir(exist_ok=True)
    (directory / "rewards.py").write_text(SLOW_REWARD.format(seconds=seconds))
    settings = {
        key: value for key, value in run_settings(directory, 8, **more).items() if not key.startswith("reward.")
    } | {"reward.functions.judge.fn": f"{directory / 'rewards.py'}:judge", "train.name": "slow"}
    settings["train.log_completions_every"] = 0
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", *overrides]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of `rlcore where`."""
    assert main(["where", *arguments]) == 0
    return capsys.readouterr().out.strip()


@pytest.mark.fault
def test_a_live_run_shows_what_its_samples_wait_for_and_a_killed_one_that_it_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "slow"
    with begun(tmp_path, seconds=500) as process:
        wait_until(lambda: (run / STATUS).exists() and "reward judge" in answered(capsys, str(run)))
        text = answered(capsys, str(run))
        assert text.startswith("step 1 of 2: scoring for ")
        assert "4 of 4 samples wait for reward judge, the oldest for " in text
        assert "actor idle" in text
        os.kill(process.pid, signal.SIGUSR1)
        wait_until(lambda: "wait for reward judge" in (run / "log.txt").read_text())
        assert process.poll() is None
    text = answered(capsys, str(run))
    assert text.startswith(f"killed: process {process.pid} is gone; the last that it wrote, ")
    assert "4 of 4 samples wait for reward judge" in text
    assert text.endswith("continue with --resume")
    assert json.loads(answered(capsys, "--json", str(run)))["state"] == "killed"


@pytest.mark.fault
def test_a_run_that_a_signal_ended_and_one_that_finished_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "slow"
    with begun(tmp_path, seconds=500) as process:
        wait_until(lambda: (run / STATUS).exists() and "reward judge" in answered(capsys, str(run)))
        process.terminate()
        process.wait(60)
    assert answered(capsys, str(run)).startswith("stopped ")
    assert "in step 1: stopped by SIGTERM" in answered(capsys, str(run))
    with begun(tmp_path / "other", seconds=0) as process:
        assert process.wait(60) == 0
    assert " ago after 2 steps" in answered(capsys, str(tmp_path / "other" / "runs" / "slow"))


def test_a_finished_run_says_so_and_one_without_a_status_that_it_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, replace(status_of(working(), began=0.0), state="finished"))
    assert answered(capsys, str(tmp_path)).startswith("finished 0 s ago after 200 steps")
    old = tmp_path / "runs" / "old"
    old.mkdir(parents=True)
    (old / "config.yaml").touch()
    assert answered(capsys, str(old)) == "no process trains in it, and it has no status.json"


@pytest.mark.parametrize("path", ["checkpoints/step_8", "checkpoints/latest", "checkpoints", ""])
def test_a_checkpoint_stands_for_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    (tmp_path / "checkpoints" / "step_8").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_8" / "config.yaml").touch()
    (tmp_path / LOCK).touch()
    write_status(tmp_path, replace(status_of(working(), began=0.0), state="finished"))
    assert answered(capsys, str(tmp_path / path)).startswith("finished 0 s ago")


def test_a_failed_run_gives_its_reason_and_several_runs_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        status = status_of(working(), 0.0, "failed", "reward 'judge': 9 of 64\nsamples failed")
        write_status(tmp_path / name, status)
    lines = answered(capsys, str(tmp_path)).splitlines()
    assert [line[:10] for line in lines] == ["a: failed ", "b: failed "]
    assert lines[0].endswith("in step 12: reward 'judge': 9 of 64 samples failed")
    write_status(tmp_path / "a", replace(status, step=0))
    assert answered(capsys, str(tmp_path / "a")).endswith(
        " ago before its first step: reward 'judge': 9 of 64 samples failed"
    )


def test_a_run_with_a_damaged_status_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / STATUS).write_text("{")
    write_status(tmp_path / "b", status_of(working(), 0.0, "failed", "it is bad"))
    assert main(["where", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("b: failed ")
    assert err.startswith(f"rlcore: '{tmp_path / 'a' / STATUS}': it is not a status of a run")
    assert err.count("\n") == 1


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["nothing", "empty", "file"])
def test_what_is_no_run_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "x")
    assert main(["where", str(tmp_path / "x")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlcore: where: ")
    assert error.count("\n") == 1


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / LOCK)
    write_status(tmp_path, status_of(working(), began=0.0))
    assert answered(capsys, str(tmp_path)).startswith("killed: ")


def test_control_characters_of_a_status_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = replace(status_of(working(), 0.0), state="failed", problem="\x1b[31m<b>red\u202e")
    write_status(tmp_path, status)
    text = answered(capsys, str(tmp_path))
    assert "\x1b" not in text
    assert "\u202e" not in text
