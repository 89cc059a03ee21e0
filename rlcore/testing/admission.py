"""Rejects requests for a while when a server sleeps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SleepGate:
    """Lets requests in while it is open, and knows when the last one has left."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._num_inside = 0
        self.open()
        self._empty.set()

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """A request, which waits here while nobody is let in."""
        await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    def open(self) -> None:
        """Let requests in."""
        self._open.set()

    async def close(self) -> None:
        """Let no more in, and wait until those that are inside have left."""
        self._open.clear()
        await self._empty.wait()
