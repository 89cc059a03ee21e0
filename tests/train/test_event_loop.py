"""A run survives what foreign code does to its event loop, or ends in one line."""

import asyncio
import logging
import signal
import time

import pytest

from rlcore.errors import WorkerError
from rlcore.train import event_loop
from rlcore.train.event_loop import run_to_end
from rlcore.train.signals import name_of


async def steps() -> int:
    for _ in range(3):
        await asyncio.sleep(0.001)
    return 3


def test_a_stopped_event_loop_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> int:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        return await steps()

    assert run_to_end(work()) == 3
    assert "has stopped the event loop, which continues" in caplog.text


def test_tasks_that_ignore_their_cancellation_are_left_behind_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "CANCEL_S", 0.02)
    is_over = False

    async def stubborn() -> None:
        while not is_over:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async def work() -> int:
        kept.append(asyncio.create_task(stubborn(), name="reward of mine"))
        return await steps()

    kept: list[asyncio.Task[None]] = []
    began = time.monotonic()
    assert run_to_end(work()) == 3
    assert time.monotonic() - began < 5.0
    is_over = True
    assert "left behind, because they ignore their cancellation: reward of mine" in caplog.text


def test_a_run_whose_tasks_are_all_cancelled_ends_in_one_line_after_it_has_closed() -> None:
    closed = []

    async def work() -> int:
        try:
            asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks()])
            return await steps()
        finally:
            closed.append(True)

    with pytest.raises(
        WorkerError, match=r"^train: found the run cancelled by code in this process, .*--resume --from-start$"
    ):
        run_to_end(work())
    assert closed == [True]


def test_errors_and_results_are_those_of_the_work(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise RuntimeError("mine")

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match=r"^mine$"):
        run_to_end(work())
    assert caplog.text == ""


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_end_of_a_run_names_its_signal(signum: int, name: str) -> None:
    assert name_of(signum) == name
