"""Child processes in which sync code runs, so that a call can be killed."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rlcore.contracts.workers import Child
from rlcore.errors import ChildError, RlcoreError


class LostProcess(ChildError):
    """The process of a call was ended because of another call."""


@dataclass(eq=False)
class ChildSlot:
    """A place for a child; when its child has died the next call gets a new one."""

    index: int
    child: Child
    generation: int = 0
    """How many children have died here: what they held is lost."""
    calls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """As many as the child takes at a time."""
    waiting: int = 0
    killed_by: str = ""
    """What the call had done because of which the child of this generation was killed."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class ChildPool:
    """A fixed number of seats; a call goes to the one with the fewest calls before it."""

    def __init__(self, start_child: Callable[[int], Awaitable[Child]], num: int, calls: int = 1) -> None:
        self._start_child, self._num, self._calls = start_child, num, calls
        self._seats: list[ChildSlot] = []

    async def start(self) -> None:
        """Start a child for each seat."""
        for index in range(self._num):
            calls = asyncio.Semaphore(self._calls)
            self._seats.append(ChildSlot(index, await self._start_child(index), calls=calls))

    def take_over(self, other: "ChildPool") -> None:
        """Serve with the children that another one started."""
        self._seats, other._seats = other._seats, []

    async def close(self) -> None:
        """End the children; also more than once."""
        seats, self._seats = self._seats, []
        await asyncio.gather(*(seat.child.close() for seat in seats))

    def free(self) -> ChildSlot:
        """The seat with the fewest calls before it."""
        return min(self._seats, key=lambda seat: seat.waiting)

    async def call(
        self,
        seat: ChildSlot,
        who: str,
        deadline_s: float,
        method: str,
        *args: Any,
        generation: int | None = None,
        began: Callable[[], None] = lambda: None,
    ) -> Any:
        """The method's result. ChildError, whose message begins with what went wrong, for whatever went wrong;
        LostProcess when that was another call, which is named.

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
                        seat.killed_by = ""
                began()
                if generation is not None and seat.generation != generation:
                    raise ChildError(f"{who} lost what it held: the process it was in has ended")
                return await self._result(seat, who, seat.child.call(method, *args, deadline_s=deadline_s), deadline_s)
        finally:
            seat.waiting -= 1

    async def _result(self, seat: ChildSlot, who: str, call: Awaitable[Any], deadline_s: float) -> Any:
        try:
            return await call
        except TimeoutError as cause:
            seat.killed_by = f"{who} took longer than {deadline_s:g} s"
            raise ChildError(seat.killed_by) from cause
        except ChildError:
            raise
        except RlcoreError as cause:
            if seat.killed_by:
                raise LostProcess(f"the process it ran in was killed: {seat.killed_by}, in another call") from cause
            if self._calls > 1:
                raise ChildError(f"the process of {who} has ended, which up to {self._calls} share: {cause}") from cause
            raise ChildError(f"{who} ended the process it ran in") from cause
