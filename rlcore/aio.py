"""Tools that asyncio lacks: an inbox for one reader, a choice among targets that come and go, deadlines, slots."""

import asyncio
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

from rlcore.errors import RlcoreError, WorkerError, boundary

T = TypeVar("T")
S = TypeVar("S", bound="Slot")

SHORTEST_S = 0.002
"""Seconds between two checks of all deadlines, so the most that a callback may be late."""


class Inbox(Generic[T]):
    """Items for one reader, in the order of their arrival; an error is raised after the items before it."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    def __bool__(self) -> bool:
        """True while an item can be taken without waiting."""
        return bool(self._items)

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Raise the error to the reader once every item is taken; of several errors the first."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def take(self) -> T:
        """The next item; waits while there is none. Raises what `fail` was given."""
        while not self._items:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()


class Dispatcher(Generic[T]):
    """Chooses the least loaded of the targets that are usable at the moment."""

    def __init__(self, targets: Sequence[T], usable: Callable[[T], bool]) -> None:
        self.targets = tuple(targets)
        self._usable = usable
        self._changed = asyncio.Event()

    def choose(self, load: Callable[[T], Any], avoid: T | None = None) -> T | None:
        """The usable target of the least `load`, of equals the first; None while no target is usable.

        `avoid` is chosen only when it is the only one.
        """
        usable = [target for target in self.targets if self._usable(target)]
        if len(usable) < 2:
            return usable[0] if usable else None
        return min([target for target in usable if target is not avoid], key=load)

    def notify(self) -> None:
        """A target has become usable, or never will: wake all waiters of `change`."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until `notify` is called."""
        self._changed.clear()
        await self._changed.wait()


class Timers:
    """Many deadlines on one loop timer; most are cancelled before they expire. Times are those of the running loop."""

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        self._new: dict[object, tuple[float, Callable[[], None]]] | None = None
        """Of this turn of the loop; None: nothing was set for its end."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: object, due: float, callback: Callable[[], None]) -> None:
        """Call back at `due`, unless the key is cancelled."""
        self._due[key] = due, callback
        # A timer of an earlier deadline stays when that is kept: it finds nothing due, and looks further.
        if self._timer is None or due < self._timer.when():
            self._look_at(due)

    def set_if_it_lasts(self, key: object, due: float, callback: Callable[[], None]) -> None:
        """Like `set`, but at the end of this turn of the loop: a deadline that this turn cancels, as most are, costs no
        timer."""
        if self._new is None:
            self._new = {}
            asyncio.get_running_loop().call_soon(self._set_new)
        self._new[key] = due, callback

    def _set_new(self) -> None:
        new, self._new = self._new or {}, None
        for key, (due, callback) in new.items():
            self.set(key, due, callback)

    def take_back(self, key: object) -> None:
        """Cancel a deadline. No effect if there is none."""
        if self._new is not None:
            self._new.pop(key, None)
        self._due.pop(key, None)
        if not self._due:
            self._look_at(None)

    def within(self, seconds: float) -> "TimeLimit":
        """`with timers.within(seconds)`: `asyncio.timeout`, without a separate timer."""
        return self.until(asyncio.get_running_loop().time() + seconds)

    def until(self, due: float) -> "TimeLimit":
        """`within`, by the running loop's clock."""
        return TimeLimit(self, due)

    def _look_at(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        try:
            for key in [key for key, (due, _) in self._due.items() if due <= now]:
                if (found := self._due.pop(key, None)) is not None:  # another callback may have taken it back
                    found[1]()
        finally:
            if self._due:
                self._look_at(max(now + SHORTEST_S, min(due for due, _ in self._due.values())))


class TimeLimit:
    """A block of one task, which is cancelled when its time is up; leaving it after that raises TimeoutError."""

    __slots__ = ("_due", "_num_cancels", "_task", "_timers", "expired")

    def __init__(self, timers: Timers, due: float) -> None:
        self._timers, self._due = timers, due
        self._task: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self.expired = False
        """True if its time was up before it was left."""

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("a time limit is of a task, and this is none")
        self._num_cancels = self._task.cancelling()
        self._timers.set_if_it_lasts(self, self._due, self._expire)

    def _expire(self) -> None:
        self.expired = True
        if self._task is not None:
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timers.take_back(self)
        if self.expired and self._task is not None:
            cancelled_by_others = self._task.uncancel() > self._num_cancels
            if kind is asyncio.CancelledError and not cancelled_by_others:
                raise TimeoutError from error


class Stopwatch:
    """Seconds during which at least one of many overlapping activities ran."""

    def __init__(self) -> None:
        self._num_running = 0
        self._since = 0.0
        self._total_s = 0.0

    def start(self) -> None:
        """An activity starts."""
        if self._num_running == 0:
            self._since = time.monotonic()
        self._num_running += 1

    def stop(self) -> None:
        """An activity ends."""
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
    """A place where calls run."""

    free: int
    """Calls that may still start here."""
    waiting: "list[tuple[bool, int, asyncio.Future[Any]]]" = field(default_factory=list)
    """A heap of the calls that need this slot and no other."""


class SlotQueue(Generic[S]):
    """Hands out slots: urgent calls come before others, and of one kind the first comes first.

    Each call holds one slot, and their number is fixed. For limits that vary with a service, or that reserve capacity
    for evaluation, count calls instead.
    """

    def __init__(self, slots: Sequence[S], queued: Stopwatch) -> None:
        """`queued` runs while a call waits."""
        self.slots = slots
        self._queued = queued
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, int, asyncio.Future[S]]] = []

    def take_now(self) -> S | None:
        """The slot with the most room; None while all are taken. Give back each slot that was taken."""
        slot = self.slots[0] if len(self.slots) == 1 else max(self.slots, key=lambda slot: slot.free)
        if not slot.free:
            return None
        slot.free -= 1
        return slot

    async def take(self, urgent: bool, only: S | None = None) -> S:
        """A slot like that of `take_now`, or `only` that one; waits while all are taken."""
        if only is not None and only.free:
            only.free -= 1
            return only
        if only is None and (slot := self.take_now()) is not None:
            return slot
        turn: asyncio.Future[S] = asyncio.get_running_loop().create_future()
        waiting = self._waiting if only is None else only.waiting
        heapq.heappush(waiting, (not urgent, next(self._numbers), turn))
        self._queued.start()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            raise
        finally:
            self._queued.stop()

    def give_back(self, slot: S) -> None:
        """The slot has room for one more call: wake the first that waits for it or for any."""
        while waiting := [heap for heap in (self._waiting, slot.waiting) if heap]:
            _, _, turn = heapq.heappop(min(waiting, key=lambda heap: heap[0][:2]))
            if not turn.done():
                turn.set_result(slot)
                return
        slot.free += 1


class SleepGate:
    """Admits calls while it is open. Closing it, such as to free a device, waits until those inside have ended."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._num_inside = 0

    @property
    def is_open(self) -> bool:
        """True from `open` until `close` is called."""
        return self._open.is_set()

    @asynccontextmanager
    async def inside(self) -> AsyncGenerator[None, None]:
        """Wait until it is open; it is not closed before the block has ended."""
        while not self.is_open:  # it may have been closed again before this call resumes
            await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    async def close(self) -> None:
        """Admit no further calls, and wait for those inside."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        """Admit the waiting calls and further ones."""
        self._open.set()


async def all_or_none(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; when one fails, cancel the others, wait until they have ended, and raise its error
    unchanged."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_daemon_thread(name: str, call: Callable[[], T]) -> T:
    """The result of the call, without blocking the event loop.

    Its RlcoreErrors pass; other exceptions become WorkerErrors that begin with `name`.
    """
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():  # from here on a caller that is cancelled only stops waiting
            return
        try:
            with boundary(name, WorkerError, BaseException):
                done.set_result(call())
        except RlcoreError as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
