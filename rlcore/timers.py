"""Many deadlines on one timer of the event loop: of those that are set hardly any comes due."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

SHORTEST_S = 0.002
"""Between two looks at everything that is set: so late a callback may be."""


class Timers:
    """Calls back what was not taken back by the time it is due, as the running loop's clock counts."""

    def __init__(self) -> None:
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: object, due: float, callback: Callable[[], None]) -> None:
        """Call back at `due`, unless the key is taken back."""
        self._due[key] = due, callback
        # A timer of an earlier deadline stays when that is kept: it finds nothing due, and looks further.
        if self._timer is None or due < self._timer.when():
            self._look_at(due)

    def take_back(self, key: object) -> None:
        """Do not call back; also when there is nothing to take back any more."""
        self._due.pop(key, None)
        if not self._due:
            self._look_at(None)

    def within(self, seconds: float) -> "TimeLimit":
        """`with timers.within(seconds)`: `asyncio.timeout`, without a timer of its own."""
        return TimeLimit(self, seconds)

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

    __slots__ = ("_num_cancels", "_seconds", "_task", "_timers", "expired")

    def __init__(self, timers: Timers, seconds: float) -> None:
        self._timers, self._seconds = timers, seconds
        self._task: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self.expired = False
        """Whether its time was up before it was left."""

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        if self._task is None:
            raise RuntimeError("a time limit is of a task, and this is none")
        self._num_cancels = self._task.cancelling()
        self._timers.set(self, asyncio.get_running_loop().time() + self._seconds, self._expire)

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
