"""Joins the answers of the ranks of one replica."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

NOTICE_S = 5.0
"""Seconds that a rank's error waits for news of another rank's death, which may be its cause."""


async def answers_of_ranks(works: Sequence[Any], has_ended: Callable[[int], bool]) -> list[Any]:
    """The results by rank; if one raises, the others are cancelled and its error is raised.

    A dying rank makes ranks fail that were waiting for it, possibly before its own error arrives. The error of a rank
    that has ended, `has_ended(rank)`, takes precedence.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = _failed(tasks)
        if failed and not any(map(has_ended, failed)):
            await _until(tasks, has_ended)
        for rank in sorted(_failed(tasks), key=lambda rank: (not has_ended(rank), rank not in failed, rank)):
            tasks[rank].result()
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failed(tasks: Sequence["asyncio.Future[Any]"]) -> list[int]:
    return [rank for rank, task in enumerate(tasks) if task.done() and (task.cancelled() or task.exception())]


async def _until(tasks: Sequence["asyncio.Future[Any]"], has_ended: Callable[[int], bool]) -> None:
    """Return when an ended rank has failed, when all have answered, or after a timeout."""
    ends_at = asyncio.get_running_loop().time() + NOTICE_S
    while waiting := [task for task in tasks if not task.done()]:
        left = ends_at - asyncio.get_running_loop().time()
        await asyncio.wait(waiting, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if left <= 0 or any(map(has_ended, _failed(tasks))):
            return
