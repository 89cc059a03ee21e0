"""Calls in daemon threads: results, errors, and callers that no longer wait."""

import asyncio
import threading
from typing import Any

import pytest

from rlcore.aio import in_daemon_thread
from rlcore.errors import PluginError, WorkerError


def test_a_result_comes_and_an_error_names_the_call() -> None:
    def fail(error: Exception) -> None:
        raise error

    async def story() -> None:
        assert await in_daemon_thread("adding", lambda: 1 + 1) == 2
        with pytest.raises(WorkerError, match=r"^adding: ValueError: a number \(\S+/test_daemon_threads\.py:15\)$"):
            await in_daemon_thread("adding", lambda: fail(ValueError("a number")))
        with pytest.raises(PluginError, match=r"^as it was$"):
            await in_daemon_thread("adding", lambda: fail(PluginError("as it was")))

    asyncio.run(story())


def test_a_call_whose_caller_was_cancelled_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    begun, may_end, threads = threading.Event(), threading.Event(), set(threading.enumerate())

    def wait() -> None:
        begun.set()
        may_end.wait(20.0)

    async def story() -> None:
        waiting = asyncio.ensure_future(in_daemon_thread("waiting", wait))
        await asyncio.to_thread(begun.wait, 20.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(story())
    may_end.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(20.0)
    assert uncaught == []
