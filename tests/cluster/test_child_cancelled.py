"""A start or a close of a child process that is cancelled leaves nothing, and leaves others waiting."""

import asyncio
from collections.abc import Coroutine
from threading import Event
from typing import Any

import pytest

from rlcore.cluster import strays
from rlcore.cluster.child import ChildProcesses
from rlcore.cluster.process import WorkerProcess

SERVED = "collections:OrderedDict"


async def cancelled_after(turns: int, work: Coroutine[Any, Any, Any]) -> None:
    """Runs the work for so many turns of the loop, and cancels it."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("turns", range(6))
def test_a_start_that_is_cancelled_leaves_no_process(turns: int) -> None:
    """After so many turns of the loop; the fixture of every test looks for what is left."""

    async def main() -> list[int]:
        children = ChildProcesses()
        await cancelled_after(turns, children.start(SERVED, name="x"))
        return children.pids

    assert asyncio.run(main()) == []


@pytest.mark.parametrize("turns", range(1, 7))
def test_a_start_of_a_worker_that_is_cancelled_leaves_no_process(turns: int) -> None:
    """The same for the process of a worker, such as of one rank whose neighbour did not start."""

    async def main() -> bool:
        process = WorkerProcess("x", {}, 0)
        await cancelled_after(turns, process.start())
        return process.alive

    assert not asyncio.run(main())


def test_a_close_that_is_cancelled_leaves_the_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Event()
    monkeypatch.setattr(strays, "end_strays", lambda mark: looked.wait(10))

    async def main() -> bool:
        children = ChildProcesses()
        child = await children.start(SERVED, name="x")
        first, second = (asyncio.create_task(child.close()) for _ in range(2))
        await child.wait()
        await asyncio.sleep(0.05)  # both wait for the search for strays
        first.cancel()
        looked.set()
        await second
        return child.ended

    assert asyncio.run(main())
