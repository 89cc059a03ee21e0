"""Joins the answers of the ranks of one replica."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

NOTICE_S = 5.0
"""Seconds for which an error of a rank waits for the end of another rank to become known, which may be its cause."""


async def answers_of_ranks(works: Sequence[Any], has_ended: Callable[[int], bool]) -> list[Any]:
    """The results by rank; when one raises, the others are cancelled and its error is raised.

    A rank that dies makes those fail that were waiting for it, and they may say so first: the error of one that has
    ended, `has_ended(rank)`, is raised in place of theirs.
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
    """Return when a rank has failed that has ended, when all have answered, or after a while."""
    ends_at = asyncio.get_running_loop().time() + NOTICE_S
    while waiting := [task for task in tasks if not task.done()]:
        left = ends_at - asyncio.get_running_loop().time()
        await asyncio.wait(waiting, timeout=max(left, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if left <= 0 or any(map(has_ended, _failed(tasks))):
            return
