"""Holds requests back while a server sleeps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SleepGate:
    """Admits requests while it is open, and waits for the last one to leave when it closes."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._num_inside = 0
        self.open()
        self._empty.set()

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """A context for one request, which waits to enter while the gate is closed."""
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
        """Admit requests."""
        self._open.set()

    async def close(self) -> None:
        """Stop admitting requests, and wait until those inside have left."""
        self._open.clear()
        await self._empty.wait()
