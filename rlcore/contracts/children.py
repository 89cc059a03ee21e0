"""Killable child processes: components and workers start them, and a pool lets calls share them.

Code that may hang, crash or hold memory runs in a child. When a call passes its deadline, its process is killed.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore.aio import Slot, SlotQueue, Stopwatch, all_or_none
from rlcore.errors import ConfigError, RlcoreError, WorkerError
from rlcore.types import Lane


def check_exported(key: str, names: Sequence[str]) -> None:
    """ConfigError for an environment variable that the setting `key` passes to children, and that is not set here."""
    for name in names:
        if name not in os.environ:
            raise ConfigError(f"{key}: the environment variable '{name}' is not set; export it, or leave it out")


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
    """Starts child processes; the run ends those that remain."""

    async def start(
        self,
        target: str,
        *args: Any,
        name: str,
        threads: int = 1,
        deadline_s: float = 60.0,
        env: Sequence[str] | None = None,
    ) -> Child:
        """Start a child, which calls `target` ('module:attr' or '/abs/file.py:attr') with `args` (picklable).

        The child serves the methods of the object that `target` returns. `threads` calls run at a time; with 1, each
        runs on the child's main thread. The child imports no module of rlcore that imports torch. Results are built-in
        values, numpy arrays of numbers, and frozen dataclasses or enums of rlcore or of the target's package. `env`
        names the environment variables that the child gets in addition to those that any Python process needs; None: it
        gets all.
        """
        ...


class NoChildren:
    """The `Children` of code that cannot start any: `start` raises WorkerError."""

    async def start(
        self,
        target: str,
        *args: Any,
        name: str,
        threads: int = 1,
        deadline_s: float = 60.0,
        env: Sequence[str] | None = None,
    ) -> Child:
        """See `Children.start`."""
        raise WorkerError(f"child '{name}': nothing here starts children; needs the context that a cluster makes")


class LostProcess(WorkerError):
    """The process that ran a call, or held its data, was killed because of another call."""


class RestartError(WorkerError):
    """The process of a slot has ended and cannot be replaced."""


@dataclass(eq=False)
class ChildSlot(Slot):
    """The slot of one child of a pool."""

    index: int = 0
    child: Child | None = None
    generation: int = 0
    """Number of children that were replaced in this slot; their data is lost."""
    killed_by: str = ""
    """The call that caused this child to be killed, and the reason: '<who> took longer than 2 s'; empty: none."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the child is started or replaced."""

    @property
    def alive(self) -> bool:
        """True if a child serves here now; otherwise the next call replaces it."""
        return self.child is not None and self.child.alive


class ChildPool:
    """A fixed number of children that calls share. A dead child is replaced when the next call needs it.

    A call takes the first child with room; calls of an evaluation have priority over those of training. A call that
    needs data in a certain child names its slot (`pick`), and the generation that holds the data.
    """

    def __init__(
        self,
        start_child: Callable[[int], Awaitable[Child]],
        num: int,
        calls: int = 1,
        queued: Stopwatch | None = None,
    ) -> None:
        """`start_child` starts the child of an index. Each child runs `calls` calls at a time (`threads` of
        `Children.start`). `queued` runs while a call waits for room."""
        self._start_child = start_child
        self._slots = SlotQueue([ChildSlot(calls, index=index) for index in range(num)], queued or Stopwatch())
        self._closed = False
        self.num_restarts = 0
        """Children that had to be replaced so far."""

    async def first(self) -> Child:
        """Start the first child, whose object can be inspected before the others start."""
        return await self._serving(self._slots.slots[0])

    async def start(self) -> None:
        """Start every child that does not run yet. If one fails, its error is raised unchanged."""
        await all_or_none([self._serving(slot) for slot in self._slots.slots])

    async def close(self) -> None:
        """End the children. May be called more than once. Later calls raise WorkerError."""
        self._closed = True
        children = [slot.child for slot in self._slots.slots if slot.child is not None]
        await asyncio.gather(*(child.close() for child in children))

    def pick(self) -> ChildSlot:
        """The slot with the fewest calls, running and waiting."""
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

        The deadline starts when a child has room; `began` is called then. Raises the errors of `Child.call`;
        LostProcess when another call caused the process to be killed, or when `slot` is no longer in `generation`;
        RestartError when a child cannot be replaced; WorkerError after `close`.
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
        if self._closed:  # closed during the start: `close` did not see this child
            await child.close()
            raise WorkerError(f"{who}: its process was closed while it was started")
        slot.child = child
        return child
