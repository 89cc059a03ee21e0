"""Checkpoints written during training: the state of their step, one at a time, with errors reported."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.contracts.activity import EndedWork
from rlcore.errors import CheckpointError, ConfigError, RlcoreError, WorkerError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.report.trace import TraceLog
from rlcore.testing.runs import differing, run_settings
from rlcore.train import Start, checkpoint, run_training
from rlcore.train.callbacks import Callbacks
from rlcore.train.saving import Saver
from rlcore.train.signals import Stopped
from rlcore.train.trainer import Trainer

STEPS = 4
PLUGIN = """
import asyncio
import errno
import os
import time

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullActor, NullRollout

RLCORE_API = "1"
LAST = 4


class Patient(NullActor):
    \"\"\"Writes a checkpoint when a step after it has been trained, and notes what is called when.\"\"\"

    writing = 0

    def note(self, what):
        with (self.context.run_dir / "calls.txt").open("a") as file:
            print(what, self.num_updates, file=file)

    def snapshot(self):
        self.taken = self.num_updates
        self.note("snapshot")
        return super().snapshot()

    async def write_snapshot(self, directory):
        taken, self.writing = self.taken, self.writing + 1
        self.note(f"write-{self.writing}")
        ends = time.monotonic() + 20
        while self.num_updates == taken and taken < LAST:
            assert time.monotonic() < ends, "no step was trained while the checkpoint waited to be written"
            await asyncio.sleep(0.001)
        await super().write_snapshot(directory)
        self.writing -= 1
        self.note("written")

    def save(self, directory):
        self.note("save")
        super().save(directory)


class Full(Patient):
    async def write_snapshot(self, directory):
        if self.taken == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "model"))
        await super().write_snapshot(directory)


class Plain(Patient):
    \"\"\"Takes no snapshots.\"\"\"

    def snapshot(self):
        return False


@hookimpl
def rlcore_worker_classes():
    actors = {"patient": Patient, "full": Full, "plain": Plain}
    return [
        offer
        for name, actor in actors.items()
        for offer in (
            WorkerClass(ActorWorker, name, actor),
            WorkerClass(RolloutWorker, name, NullRollout, embedded_in=ACTOR),
        )
    ]
"""


def planned(tmp_path: Path, backend: str, name: str, last: int = STEPS, **more: Any) -> RunPlan:
    """The plan of four steps with a checkpoint after each; that of step `last` does not wait."""
    file = tmp_path / f"waits_{last}.py"
    file.write_text(PLUGIN.replace("LAST = 4", f"LAST = {last}"))
    settings = {
        "actor.backend": backend,
        "rollout.backend": backend,
        "train.name": name,
        "train.max_steps": STEPS,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 0,
        **more,
    }
    plugins = ["null"] if backend == "null" else ["null", str(file)]
    values = run_settings(tmp_path, 16, **settings)
    return plan_run([], [f"{key}={value}" for key, value in values.items()], plugins)


def calls(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / "runs" / name / "calls.txt").read_text().splitlines()


@pytest.mark.slow
def test_training_continues_while_a_checkpoint_waits_and_its_state_is_that_of_its_step(tmp_path: Path) -> None:
    whole = run_training(planned(tmp_path, "null", "whole")).run_dir
    run = run_training(planned(tmp_path, "patient", "patient"))
    assert run.checkpoint == run.run_dir / "checkpoints" / f"step_{STEPS}"
    assert differing(whole, run.run_dir) == []
    for step in range(1, STEPS + 1):
        ours, theirs = (path / "checkpoints" / f"step_{step}" for path in (run.run_dir, whole))
        checkpoint.load(ours)
        for file in ("model/logits_V.npy", "moment1_V.npy", "moment2_V.npy"):
            np.testing.assert_array_equal(np.load(ours / file), np.load(theirs / file))
        for file in ("actor.json", "state.json"):
            assert json.loads((ours / file).read_text()) == json.loads((theirs / file).read_text())


@pytest.mark.slow
def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    run_training(planned(tmp_path, "patient", "patient"))
    found = calls(tmp_path, "patient")
    assert [line.split()[0] for line in found] == ["snapshot", "write-1", "written"] * STEPS
    assert found[:3] == ["snapshot 1", "write-1 1", "written 2"]


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_from_a_checkpoint_written_in_the_background(tmp_path: Path) -> None:
    whole = run_training(planned(tmp_path, "null", "whole")).run_dir
    run = run_training(planned(tmp_path, "patient", "patient")).run_dir
    for step in (3, 4):
        directory = run / "checkpoints" / f"step_{step}"
        directory.rename(run / f"away-{step}")
    run_training(planned(tmp_path, "patient", "patient"), Start(resume=True))
    assert differing(whole, run) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["plain", "patient"])
def test_training_waits_for_an_actor_without_snapshots_and_where_the_host_holds_no_copy(
    tmp_path: Path, backend: str
) -> None:
    plan = planned(tmp_path, backend, "waits")
    run = run_training(plan if backend == "plain" else replace(plan, saves_copies=False))
    assert run.checkpoint is not None
    assert calls(tmp_path, "waits") == [f"save {step}" for step in range(1, STEPS + 1)]


@pytest.mark.slow
def test_a_write_error_ends_the_run_and_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    words = r"No space left on device.*last checkpoint: .*step_1, continue with --resume"
    with pytest.raises(RlcoreError, match=words):
        run_training(planned(tmp_path, "full", "full"))
    run = tmp_path / "runs" / "full"
    newest = checkpoint.latest(run)
    assert newest is not None
    assert newest.name == "step_1"
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.endswith(".staging")]
    whole = run_training(planned(tmp_path, "null", "whole")).run_dir
    run_training(planned(tmp_path, "null", "full"), Start(resume=True))
    assert differing(whole, run) == []


def test_behind_an_error_of_the_run_the_checkpoint_that_is_being_written_is_finished(tmp_path: Path) -> None:
    def refuses(step: int, found: Any) -> bool:
        if step == 2:
            raise ValueError("seen enough")
        return False

    with pytest.raises(ConfigError, match=r"the run ended after step 2: .*step_2, continue with --resume"):
        run_training(planned(tmp_path, "patient", "ended", last=2), Start(), Callbacks(stop_when=refuses))
    assert calls(tmp_path, "ended")[-1] == "written 2"


@pytest.mark.slow
def test_a_run_that_a_worker_ends_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    slow = {"plugins.null.save_s": 1.0, "plugins.null.fail_at_update": 3}
    with pytest.raises(RlcoreError, match="update 3 fails"):
        run_training(planned(tmp_path, "null", "failed", **slow))
    newest = checkpoint.latest(tmp_path / "runs" / "failed")
    assert newest is not None
    assert newest.name == "step_2"


@pytest.mark.slow
def test_what_ends_while_a_checkpoint_is_written_is_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = Saver._save_workers

    async def with_an_evaluation(saver: Saver, staging: Path, copied: asyncio.Event) -> None:
        await really(saver, staging, copied)
        saver._trainer.evaluations.append((saver._step_saving, {"late": 1.0}))

    monkeypatch.setattr(Saver, "_save_workers", with_an_evaluation)
    run = run_training(planned(tmp_path, "null", "late")).run_dir
    for step in range(1, STEPS + 1):
        state = json.loads((run / "checkpoints" / f"step_{step}" / "state.json").read_text())
        assert [late for late, _ in state["evaluations"]] == list(range(1, step))


@pytest.mark.slow
def test_the_time_for_which_a_save_keeps_training_is_a_metric_of_the_next_step(tmp_path: Path) -> None:
    run = run_training(planned(tmp_path, "null", "timed", **{"checkpoint.every_steps": 2})).run_dir
    found = {row["step"]: row.get("time/save_blocked_s") for row in metrics.read(run)}
    assert [step for step, seconds in found.items() if seconds is not None] == [3]


def test_a_signal_while_a_save_waits_for_the_records_of_its_step_lets_them_be_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last spans belong to the same file, which has room for one writer."""
    saving, closing = threading.Event(), threading.Event()
    overlapped: list[bool] = []
    really_written, really_write = Trainer.written, TraceLog.write

    async def note(trainer: Trainer) -> None:
        if trainer._writing is not None:
            saving.set()
        await really_written(trainer)

    def write(log: TraceLog, step: int, ended: EndedWork) -> None:
        if threading.current_thread() is threading.main_thread():
            closing.set()
        else:
            assert saving.wait(20)
            os.kill(os.getpid(), signal.SIGTERM)
            overlapped.append(closing.wait(1.0))
        really_write(log, step, ended)

    monkeypatch.setattr(Trainer, "written", note)
    monkeypatch.setattr(TraceLog, "write", write)
    with pytest.raises(Stopped, match=r"the last checkpoint is .*step_1; continue with --resume"):
        run_training(planned(tmp_path, "null", "stopped"))
    assert overlapped == [False], "the last spans were written beside those of the step"
    assert closing.is_set()


def refuse_records(monkeypatch: pytest.MonkeyPatch, and_then: Callable[[], object]) -> None:
    """The trajectories of step 2 cannot be written; what is called then is called before the run learns of it."""
    really = metrics.TrajectoryLog.append

    def append(log: metrics.TrajectoryLog, step: int, lines: bytes) -> None:
        if step == 2:
            and_then()
            raise CheckpointError("records of step 2 cannot be written")
        really(log, step, lines)

    monkeypatch.setattr(metrics.TrajectoryLog, "append", append)


@pytest.mark.parametrize("every_steps", [3, 1])
def test_on_a_signal_a_step_whose_records_cannot_be_written_is_saved_all_the_same(
    every_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the save of that step was waiting for these records."""
    saving, closing = threading.Event(), threading.Event()
    really_written, really_close = Trainer.written, Trainer.close

    async def written(trainer: Trainer) -> None:
        if trainer.progress.step == 2 and trainer._writing is not None:
            saving.set()
        await really_written(trainer)

    async def close(trainer: Trainer, *raised: Any) -> None:
        closing.set()
        await really_close(trainer, *raised)

    def signalled() -> None:
        assert every_steps > 2 or saving.wait(20)
        os.kill(os.getpid(), signal.SIGTERM)
        assert closing.wait(20)

    monkeypatch.setattr(Trainer, "written", written)
    monkeypatch.setattr(Trainer, "close", close)
    refuse_records(monkeypatch, signalled)
    with pytest.raises(Stopped, match=r"saved; the last checkpoint is .*step_2; continue with --resume"):
        run_training(planned(tmp_path, "null", "stopped", **{"checkpoint.every_steps": every_steps}))
    assert " WARNING rlcore.train" in (log := (tmp_path / "runs" / "stopped" / "log.txt").read_text())
    assert "records of step 2 cannot be written" in log


def test_records_that_cannot_be_written_do_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()
    update = Trainer.update

    async def fail(trainer: Trainer, *arguments: Any) -> Any:
        if trainer.progress.step == 2:
            assert failed.wait(20)
            raise WorkerError("the third update fails")
        return await update(trainer, *arguments)

    monkeypatch.setattr(Trainer, "update", fail)
    refuse_records(monkeypatch, failed.set)
    with pytest.raises(WorkerError, match="the third update fails"):
        run_training(planned(tmp_path, "null", "failed", **{"checkpoint.every_steps": 0}))
    assert "records of step 2 cannot be written" in (tmp_path / "runs" / "failed" / "log.txt").read_text()


def test_a_signal_that_the_event_loop_has_not_seen_yet_does_not_cut_off_the_end_that_it_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler runs between two lines of the run; the loop would cancel the run only later."""
    step, close, closed = Trainer.step, Trainer.close, []

    async def interrupted(trainer: Trainer) -> None:
        await step(trainer)
        if trainer.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    async def note(trainer: Trainer, *raised: Any) -> None:
        await close(trainer, *raised)
        await asyncio.sleep(0)
        closed.append(trainer.progress.step)

    monkeypatch.setattr(Trainer, "step", interrupted)
    monkeypatch.setattr(Trainer, "close", note)
    with pytest.raises(Stopped, match=r"saved; the last checkpoint is .*step_2; continue with --resume"):
        run_training(planned(tmp_path, "null", "stopped"))
    assert closed == [2]
