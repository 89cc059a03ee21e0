"""A limit on samples in progress."""

import asyncio

from rlcore.errors import ConfigError


class SampleLimit:
    """Admits groups of samples, first come, first served, while there is room for a whole group."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._limit = limit
        self._returned = asyncio.Event()
        """Set when room was returned since the first waiter checked."""
        self._turn = asyncio.Lock()

    def take_now(self, num: int) -> bool:
        """Take room for `num` samples if there is any and the queue is empty."""
        if self._turn.locked() or self._free < num:
            return False
        self._free -= num
        return True

    async def take(self, num: int) -> None:
        """Take room for `num` samples as soon as there is; ConfigError if there never will be."""
        if num > self._limit:
            raise ConfigError(
                f"plugins.agent_loop.max_conversations: it is {self._limit}, but a prompt has {num} samples, which "
                "begin together; needs at least that many"
            )
        async with self._turn:
            while self._free < num:
                self._returned.clear()
                await self._returned.wait()
            self._free -= num

    def give_back(self, num: int) -> None:
        """Return the room of `num` samples."""
        self._free += num
        self._returned.set()
