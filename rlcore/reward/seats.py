"""Who may call next: a fixed number of seats, and a queue in which evaluation stands before training."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlcore.contracts.workers import Child
from rlcore.types import Lane


class Stopwatch:
    """Seconds during which at least one of many overlapping things went on."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since = 0.0
        self._total_s = 0.0

    def start(self) -> None:
        """One more goes on."""
        if self._num_running == 0:
            self._since = time.monotonic()
        self._num_running += 1

    def stop(self) -> None:
        """One has ended."""
        self._num_running -= 1
        if self._num_running == 0:
            self._total_s += time.monotonic() - self._since

    def take(self) -> float:
        """The seconds since the last call of this method."""
        now = time.monotonic()
        seconds = self._total_s + (now - self._since if self._num_running else 0.0)
        self._total_s, self._since = 0.0, now
        return seconds


@dataclass(eq=False)
class Slot:
    """Somewhere calls run: a child, or the run's own loop."""

    free: int
    """Calls that may still start here."""
    child: Child | None = None
    renewal: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a dead child is replaced."""


class SlotQueue:
    """Hands out places to calls, first come first served within a lane."""

    def __init__(self, places: Sequence[Slot], queued: Stopwatch) -> None:
        self.places = places
        self._queued = queued
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, int, asyncio.Future[Slot]]] = []

    def take_now(self) -> Slot | None:
        """A seat at the least busy place, None while all are taken. Whoever took it gives it back."""
        place = self.places[0] if len(self.places) == 1 else max(self.places, key=lambda each: each.free)
        if not place.free:
            return None
        place.free -= 1
        return place

    async def take(self, lane: Lane) -> Slot:
        """A seat as `take_now` gives it; waits while all are taken."""
        if (place := self.take_now()) is not None:
            return place
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (lane is not Lane.EVAL, next(self._numbers), turn))
        self._queued.start()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise
        finally:
            self._queued.stop()

    def give_back(self, place: Slot) -> None:
        """The seat is free, for whoever waits first."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(place)
                return
        place.free += 1
