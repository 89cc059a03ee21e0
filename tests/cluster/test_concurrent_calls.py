"""Calls of methods marked as concurrent, to workers in threads of this process and in processes."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from rlcore.cluster.thread import WorkerThread
from rlcore.cluster.thread_workers import ThreadReplica
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.workers import Worker, concurrent, is_concurrent
from rlcore.errors import WorkerError


class Writer(Worker):
    """Computes until it is released, and writes meanwhile."""

    def setup(self) -> None:
        self.released = threading.Event()

    def compute(self) -> bool:
        return self.released.wait(20.0)

    @concurrent
    async def write(self, text: str) -> str:
        await asyncio.sleep(0)
        if not text:
            raise ValueError("nothing to write")
        if text == "slowly":
            await asyncio.sleep(0.6)
        self.released.set()
        return text


class Other(Writer):
    """Implements the interface without a mark."""

    async def write(self, text: str) -> str:
        return await super().write(text) + "!"


@contextmanager
def replica(cls: type[Writer], call_s: float = 60.0) -> Iterator[Any]:
    worker = cls.__new__(cls)
    worker.context = cast("Any", None)
    worker.setup()
    thread = WorkerThread("writer[0]").start()
    yield ThreadReplica(worker, Writer, thread, "writer[0]", Deadlines(call_s=call_s))
    asyncio.run(thread.stop(20.0))


def test_the_interface_has_the_mark_whatever_implements_it() -> None:
    assert is_concurrent(Writer.write)
    assert not is_concurrent(Writer.compute)

    async def story(found: Any) -> None:
        computing = asyncio.ensure_future(found.call(Writer.compute))
        await asyncio.sleep(0.05)
        assert await found.call(Writer.write, "a line") == "a line!"
        assert await computing

    with replica(Other) as found:
        asyncio.run(story(found))


def test_errors_and_deadlines_are_those_of_other_calls() -> None:
    failed = r"^writer\[0\]\.write\(\): ValueError: nothing to write \(\S+calls\.py:31\)$"
    with replica(Writer) as found, pytest.raises(WorkerError, match=failed):
        asyncio.run(found.call(Writer.write, ""))
    late = r"^writer\[0\]: writer\[0\]\.write\(\) took longer than 0\.2 s$"
    with replica(Writer, 0.2) as found, pytest.raises(WorkerError, match=late):
        asyncio.run(found.call(Writer.write, "slowly"))
    with pytest.raises(WorkerError, match=r"^writer\[0\] is closed$"):
        asyncio.run(found.call(Writer.write, "late"))
