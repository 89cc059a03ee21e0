"""The event loop of a run, protected from foreign async functions that run on it."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlcore.errors import WorkerError

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_S = 1.0
"""Seconds that remaining tasks have to end; tasks that ignore their cancellation are abandoned."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run`; a loop that foreign code stops is continued, and no task can keep the process from
    ending.

    WorkerError when foreign code has cancelled the work.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    task = loop.create_task(work)

    async def result() -> T:
        return await task

    try:
        while True:
            try:
                return runner.run(result())
            except RuntimeError:
                if task.done():
                    raise
                logger.warning("code that runs in this process has stopped the event loop, which continues")
            except asyncio.CancelledError as cause:
                raise WorkerError(
                    "train: found the run cancelled by code in this process, such as an async reward function; needs "
                    "code that cancels its own tasks only; continue with "
                    "--resume, before the first checkpoint with --resume --from-start"
                ) from cause
    finally:
        _close(runner, loop)


def _close(runner: asyncio.Runner, loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        runner.run(_wait_for(left))
    stubborn = [task for task in left if not task.done()]
    if not stubborn:
        runner.close()
        return
    names = ", ".join(sorted(task.get_name() for task in stubborn))
    logger.warning("left behind, because they ignore their cancellation: %s", names)
    for task in stubborn:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    asyncio.set_event_loop(None)
    loop.close()


async def _wait_for(tasks: "set[asyncio.Task[Any]]") -> None:
    await asyncio.wait(tasks, timeout=CANCEL_S)
