"""Killable child processes: how a component or a worker starts them, and the pool in which calls share some.

Code that may hang, crash or hold memory runs in a child: a call that passes its deadline is ended with its process.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore.aio import Slot, SlotQueue, Stopwatch, all_or_none
from rlcore.errors import RlcoreError, WorkerError
from rlcore.types import Lane


class Child(Protocol):
    """A killable child process that serves the methods of one object."""

    @property
    def alive(self) -> bool: ...

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result.

        Raises TimeoutError when the deadline passes (the child is then killed), WorkerError when the child died, and
        ChildError (of `rlcore.errors`) when the method itself raised.
        """
        ...

    async def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        ...


class Children(Protocol):
    """Starts child processes; the run ends those that are left."""

    async def start(
        self,
        reference: str,
        *args: Any,
        name: str,
        threads: int = 1,
        deadline_s: float = 60.0,
        env: Sequence[str] | None = None,
    ) -> Child:
        """A child in which `reference` ('module:attr' or '/abs/file.py:attr') was called with `args` (picklable).

        The result is the object whose methods the child serves; `threads` calls run at a time, on the child's main
        thread when it is 1. Nothing of rlcore that imports torch is imported there. Results are built-in values, numpy
        arrays of numbers, and frozen dataclasses or enums of rlcore or of the reference's own package. `env` names
        the environment variables that it gets beside those that any Python process needs; None: all of them.
        """
        ...


class NoChildren:
    """Stands where no child can be started: `start` raises WorkerError."""

    async def start(
        self,
        reference: str,
        *args: Any,
        name: str,
        threads: int = 1,
        deadline_s: float = 60.0,
        env: Sequence[str] | None = None,
    ) -> Child:
        """See `Children.start`."""
        raise WorkerError(f"child '{name}': nothing here starts children; needs the context that a cluster makes")


class LostProcess(WorkerError):
    """The process that a call ran in, or that held what it needs, was ended because of another call."""


class RestartError(WorkerError):
    """The process of a slot had ended, and another could not be started."""


@dataclass(eq=False)
class ChildSlot(Slot):
    """The place of one child of a pool."""

    index: int = 0
    child: Child | None = None
    generation: int = 0
    """How many children have died here: what they held is lost."""
    killed_by: str = ""
    """What the call had done because of which the child of this generation was killed."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the child is started or replaced."""

    @property
    def alive(self) -> bool:
        """True if a child serves here now; a call replaces one that does not."""
        return self.child is not None and self.child.alive


class ChildPool:
    """A fixed number of children that calls share; one that has died is replaced when the next call needs it.

    A call takes the first child that has room for it, calls of an evaluation before those of training. One that needs
    what a certain child holds names its slot (`pick`) and the generation in which that was put there.
    """

    def __init__(
        self,
        start_child: Callable[[int], Awaitable[Child]],
        num: int,
        calls: int = 1,
        queued: Stopwatch | None = None,
    ) -> None:
        """`start_child` starts the child of an index, and `calls` go on in each at a time (`threads` of
        `Children.start`). `queued` runs while a call waits for room."""
        self._start_child = start_child
        self._slots = SlotQueue([ChildSlot(calls, index=index) for index in range(num)], queued or Stopwatch())
        self._closed = False
        self.num_restarts = 0
        """Children that had to be replaced so far."""

    async def first(self) -> Child:
        """The first child, started: what it serves can be inspected before the others start."""
        return await self._serving(self._slots.slots[0])

    async def start(self) -> None:
        """Start every child that is not there yet. When one fails, its error passes as it is."""
        await all_or_none([self._serving(slot) for slot in self._slots.slots])

    async def close(self) -> None:
        """End the children; also more than once. Calls after it raise WorkerError."""
        self._closed = True
        children = [slot.child for slot in self._slots.slots if slot.child is not None]
        await asyncio.gather(*(child.close() for child in children))

    def pick(self) -> ChildSlot:
        """The slot with the fewest calls in it and before it."""
        return min(self._slots.slots, key=lambda slot: len(slot.waiting) - slot.free)

    async def call(
        self,
        method: str,
        *args: Any,
        who: str,
        deadline_s: float,
        lane: Lane = Lane.TRAIN,
        slot: ChildSlot | None = None,
        generation: int | None = None,
        began: Callable[[ChildSlot], None] = lambda slot: None,
    ) -> Any:
        """The method's result; `who` names the call in the errors of others.

        The clock runs from when a child has room, and `began` is told then. Raises what `Child.call` raises;
        LostProcess when another call ended the process, or when the child of `slot` is not that of `generation`
        any more; RestartError when a child cannot be replaced; WorkerError after `close`.
        """
        taken = await self._slots.take(lane is Lane.EVAL, slot)
        try:
            child = await self._serving(taken, who)
            began(taken)
            if generation is not None and taken.generation != generation:
                raise LostProcess(f"{who} lost what it held: the process it was in has ended")
            try:
                return await child.call(method, *args, deadline_s=deadline_s)
            except TimeoutError:
                taken.killed_by = f"{who} took longer than {deadline_s:g} s"
                raise
            except WorkerError as cause:
                if not taken.killed_by:
                    raise
                raise LostProcess(f"the process it ran in was killed: {taken.killed_by}, in another call") from cause
        finally:
            self._slots.give_back(taken)

    async def _serving(self, slot: ChildSlot, who: str = "ChildPool") -> Child:
        """The slot's child, started or replaced."""
        async with slot.starting:
            if self._closed:
                raise WorkerError(f"{who}: was called after its processes were closed")
            if slot.child is None:
                return await self._started(slot, who)
            if slot.child.alive:
                return slot.child
            self.num_restarts += 1
            await slot.child.close()
            try:
                child = await self._started(slot, who)
            except RlcoreError as cause:
                raise RestartError(f"its process ended and cannot be started again: {cause}") from cause
            slot.generation += 1
            slot.killed_by = ""
            return child

    async def _started(self, slot: ChildSlot, who: str) -> Child:
        child = await self._start_child(slot.index)
        if self._closed:  # meanwhile, so `close` has not seen it
            await child.close()
            raise WorkerError(f"{who}: its process was closed while it was started")
        slot.child = child
        return child
