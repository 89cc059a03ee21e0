"""Signals during a run: a second Ctrl-C ends the process at once with one line, and none stays blocked."""

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rlcore.contracts.activity import Activity
from rlcore.plugins.planning import plan_run
from rlcore.report.terminal import Terminal
from rlcore.testing.runs import run_settings
from rlcore.train import run_training, signals
from rlcore.train.observed import observed
from rlcore.train.saving import Saver
from rlcore.train.signals import Stopped, StopRequest

ENDED = "\nrlcore: ended at once by a second Ctrl-C; no step was taken\n"


class Ended(Exception):
    """The process would have ended."""


@pytest.fixture(autouse=True)
def _ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(signals, "REPEATED_S", 0.0)


@contextmanager
def interrupted_after(*delays_s: float) -> Iterator[None]:
    """Sends this process Ctrl-C after each delay."""
    timers = [threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)) for delay_s in delays_s]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.join()


def test_a_second_ctrl_c_ends_the_process_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        with StopRequest(finish_step=False).installed():
            os.kill(os.getpid(), signal.SIGINT)
            assert capfd.readouterr().err == ""
            with pytest.raises(Ended, match="130"):
                os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(60)

    asyncio.run(main())
    assert capfd.readouterr().err == ENDED


def test_a_signal_that_is_sent_to_the_process_and_to_its_group_is_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`timeout` sends it twice, and the run would end without the save that the first one began."""
    monkeypatch.setattr(signals, "REPEATED_S", 3600.0)

    async def main() -> None:
        request = StopRequest(finish_step=False)
        with request.installed():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(60)
            monkeypatch.setattr(signals, "REPEATED_S", 0.0)
            with pytest.raises(Ended, match="143"):
                os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(main())
    assert capfd.readouterr().err == ENDED.replace("Ctrl-C", "SIGTERM")


@pytest.mark.parametrize(
    ("step", "remains"),
    [(1, "no checkpoint was saved"), (2, "the last checkpoint is {}/checkpoints/step_1; continue with --resume")],
)
def test_a_second_ctrl_c_while_a_checkpoint_is_written_names_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], step: int, remains: str
) -> None:
    really = Saver._save_workers

    async def interrupted(saver: Saver, *arguments: Any) -> None:
        if saver._step_saving == step:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(Ended, match="130"):
                os.kill(os.getpid(), signal.SIGINT)
        await really(saver, *arguments)

    monkeypatch.setattr(Saver, "_save_workers", interrupted)
    settings = run_settings(tmp_path, 16, **{"train.name": "run", "checkpoint.every_steps": 1, "train.max_steps": 3})
    with pytest.raises(Stopped):
        run_training(plan_run([], [f"{key}={value}" for key, value in settings.items()], ["null"]))
    line = f"rlcore: ended at once by a second Ctrl-C; {remains.format(tmp_path / 'runs' / 'run')}"
    assert line in capfd.readouterr().err.splitlines()


def test_a_signal_wakes_a_loop_that_waits_and_is_not_called_blocked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "BLOCKED_S", 0.5)

    async def main() -> None:
        request = StopRequest(finish_step=False)
        with request.installed(), interrupted_after(0.2):
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(60)
            assert request.signum == signal.SIGINT
            await asyncio.sleep(1.0)

    asyncio.run(main())
    assert capfd.readouterr().err == ""


def test_code_that_blocks_the_loop_is_named_and_ended_by_a_second_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "BLOCKED_S", 0.2)

    async def main() -> None:
        with StopRequest(finish_step=True).installed(), interrupted_after(0.1, 1.0), pytest.raises(Ended, match="130"):
            time.sleep(30)

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 20
    where = rf"in main at {__file__}:\d+"
    words = rf"\nrlcore: Ctrl-C waits for code {where}; a second Ctrl-C ends the run\n{ENDED}"
    assert re.fullmatch(words, capfd.readouterr().err)


def test_signals_that_a_plugin_has_blocked_reach_the_run() -> None:
    async def main() -> None:
        with StopRequest(finish_step=True).installed():
            assert not blocked & signal.pthread_sigmask(signal.SIG_BLOCK, ())

    blocked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        asyncio.run(main())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_run_ends_as_usual_where_c_code_handled_its_signals_before_python_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python knows such a handler as None, and cannot set it."""
    install, known = signal.signal, {signum: signal.getsignal(signum) for signum in (*signals.SIGNALS, signal.SIGUSR1)}

    def of_c_code(signum: int, handler: Any) -> None:
        install(signum, handler)

    async def main() -> None:
        with StopRequest(finish_step=True).installed(), observed(tmp_path, Activity(), Terminal()):
            await asyncio.sleep(0)

    monkeypatch.setattr(signal, "getsignal", lambda signum: None)
    monkeypatch.setattr(signal, "signal", of_c_code)
    try:
        asyncio.run(main())
        monkeypatch.undo()
        assert [signal.getsignal(signum) for signum in signals.SIGNALS] == [signal.SIG_DFL] * 2
    finally:
        for signum, handler in known.items():
            install(signum, handler)
