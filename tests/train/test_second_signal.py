"""Signals during a run: a second Ctrl-C ends the process at once with one line, and none stays blocked."""

import asyncio
import os
import signal
from typing import NoReturn

import pytest

from rlcore.train.signals import StopRequest


class Ended(Exception):
    """The process would have ended."""


def test_a_second_ctrl_c_ends_the_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)

    async def main() -> None:
        task = asyncio.create_task(asyncio.sleep(60))
        request = StopRequest(finish_step=False)
        request._receive(signal.SIGINT, task)
        assert capfd.readouterr().err == ""
        with pytest.raises(Ended, match="130"):
            request._receive(signal.SIGINT, task)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert capfd.readouterr().err == "\nrlcore: ended at once by a second Ctrl-C; checkpoints stand\n"


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
