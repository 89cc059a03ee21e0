"""Calls that may never return, in threads that do not keep the process alive."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rlcore.errors import RlcoreError, WorkerError, boundary

T = TypeVar("T")


async def in_daemon_thread(name: str, call: Callable[[], T]) -> T:
    """The result of the call; the event loop keeps running meanwhile.

    Its RlcoreErrors pass; other exceptions become WorkerErrors that begin with `name`.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            with boundary(name, WorkerError, BaseException):
                done.set_result(call())
        except RlcoreError as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
