"""Runs that end while a checkpoint is being written in the background and training has gone on."""

import signal
import time
from pathlib import Path

import pytest
from forked_runs import ForkedRun, fork_run

from rlcore.testing.null import SETTINGS
from rlcore.testing.runs import differing
from rlcore.train import checkpoint

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), pytest.mark.usefixtures("forked_runs")]

WRITE_S = 2.0
SLOW = (f"plugins.null.save_s={WRITE_S}", "plugins.null.update_s=0.1")


def start(directory: Path, name: str, *more: str) -> ForkedRun:
    settings = ("train.max_steps=8", "train.prompts_per_step=4", "rollout.max_tokens=8", "checkpoint.every_steps=2")
    where = (f"train.dir={directory / 'runs'}", f"train.name={name}")
    return fork_run(["train", "--plugin", "null", *SETTINGS, *settings, *where, *more], directory / "output")


def finished(directory: Path, name: str, *more: str) -> Path:
    assert start(directory, name, *more).wait(timeout=120) == 0, (directory / "output").read_text()
    return directory / "runs" / name


@pytest.fixture
def interrupted(tmp_path: Path) -> ForkedRun:
    """A run that trains step 5 while the checkpoint of step 4 is being written; that of step 2 is there."""
    process = start(tmp_path, "run", *SLOW)
    log, until = tmp_path / "runs" / "run" / "log.txt", time.monotonic() + 90
    while not (log.exists() and "step 5: updating" in log.read_text()):
        assert process.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "saved" not in log.read_text().partition("saving step 4")[2]
    return process


def test_a_run_killed_while_writing_a_checkpoint_resumes_from_the_previous_one(
    tmp_path: Path, interrupted: ForkedRun
) -> None:
    interrupted.kill()
    interrupted.wait()
    run = tmp_path / "runs" / "run"
    assert (run / "checkpoints" / ".step_4.staging").is_dir()
    newest = checkpoint.latest(run)
    assert newest is not None
    assert newest.name == "step_2"
    finished(tmp_path, "run", "--resume")
    assert differing(finished(tmp_path, "whole"), run) == []
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_signal_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path, interrupted: ForkedRun) -> None:
    interrupted.send_signal(signal.SIGTERM)
    assert interrupted.wait(timeout=30) == 128 + signal.SIGTERM
    run, output = tmp_path / "runs" / "run", (tmp_path / "output").read_text()
    newest = checkpoint.latest(run)
    assert newest is not None
    assert checkpoint.step_of(newest) >= 4, output
    assert f"the last checkpoint is {newest}; continue with --resume" in output
    assert "Traceback" not in output
    finished(tmp_path, "run", "--resume")
    assert differing(finished(tmp_path, "whole"), run) == []


def terminated(directory: Path, text: str, *settings: str) -> str:
    """The output of a run that is terminated when its log has this text."""
    process = start(directory, "run", *settings)
    log, until = directory / "runs" / "run" / "log.txt", time.monotonic() + 90
    while not (log.exists() and text in log.read_text()):
        assert process.poll() is None, (directory / "output").read_text()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    return (directory / "output").read_text()


def test_a_signal_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    slow = ("plugins.null.save_s=60", "plugins.null.update_s=0.1", "checkpoint.shutdown_s=0.5")
    output = terminated(tmp_path, "step 3: updating", *slow)
    assert "the save did not end within checkpoint.shutdown_s=0.5" in output
    assert checkpoint.latest(tmp_path / "runs" / "run") is None


def test_a_checkpoint_is_complete_when_it_is_written_and_not_when_the_update_ends(tmp_path: Path) -> None:
    slow = ("plugins.null.save_s=0.3", "plugins.null.update_s=3", "checkpoint.shutdown_s=2.5")
    output = terminated(tmp_path, "step 2: updating", *slow, "checkpoint.every_steps=1")
    newest = checkpoint.latest(tmp_path / "runs" / "run")
    assert newest is not None, output
    assert checkpoint.step_of(newest) == 1
    assert f"saved; the last checkpoint is {newest}; continue with --resume" in output
