"""Child processes in which sync code runs, so that a call can be killed."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import ChildError, RlcoreError
from rlcore.workers import Child


@dataclass(eq=False)
class Seat:
    """A place for a child; when its child has died the next call gets a new one."""

    index: int
    child: Child
    generation: int = 0
    """How many children have died here: what they held is lost."""
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """As many as the child takes at a time."""
    waiting: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Seats:
    """A fixed number of seats; a call goes to the one with the fewest calls before it."""

    def __init__(self, start_child: Callable[[int], Awaitable[Child]], num: int, calls: int = 1) -> None:
        self._start_child, self._num, self._calls = start_child, num, calls
        self._seats: list[Seat] = []

    async def start(self) -> None:
        """Start a child for each seat."""
        for index in range(self._num):
            calls = asyncio.Semaphore(self._calls)
            self._seats.append(Seat(index, await self._start_child(index), calls=calls))

    async def close(self) -> None:
        """End the children; also more than once."""
        seats, self._seats = self._seats, []
        await asyncio.gather(*(seat.child.close() for seat in seats))

    def free(self) -> Seat:
        """The seat with the fewest calls before it."""
        return min(self._seats, key=lambda seat: seat.waiting)

    async def call(
        self,
        seat: Seat,
        who: str,
        deadline_s: float,
        method: str,
        *args: Any,
        generation: int | None = None,
        began: Callable[[], None] = lambda: None,
    ) -> Any:
        """The method's result. ChildError, whose message begins with what went wrong, for whatever went wrong.

        With `generation` the call needs what that child of the seat holds; `began` is told when its turn has come.
        """
        seat.waiting += 1
        try:
            async with seat.calls:
                async with seat.starting:
                    if not seat.child.alive:
                        await seat.child.close()
                        seat.child = await self._start_child(seat.index)
                        seat.generation += 1
                began()
                if generation is not None and seat.generation != generation:
                    raise ChildError(f"{who} lost what it held: the process it was in has ended")
                return await seat.child.call(method, *args, deadline_s=deadline_s)
        except TimeoutError as cause:
            raise ChildError(f"{who} took longer than {deadline_s:g} s") from cause
        except ChildError:
            raise
        except RlcoreError as cause:
            raise ChildError(f"{who} ended the process it ran in") from cause
        finally:
            seat.waiting -= 1
