"""Many deadlines of the same length on one timer of the event loop: of those that are set hardly any comes due."""

import asyncio
from collections.abc import Callable


class Timers:
    """Calls back what was not taken back within a time that is the same for all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[object, tuple[float, Callable[[], None]]] = {}
        """When each is due; the order in which they were set is the order in which they come due."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: object, callback: Callable[[], None]) -> None:
        """Call back after the time, on the running loop, unless the key is taken back."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        self._due[key] = due, callback
        if self._timer is None:
            self._timer = loop.call_at(due, self._ring, loop)

    def take_back(self, key: object) -> None:
        """Do not call back; also when there is nothing to take back any more."""
        self._due.pop(key, None)
        if not self._due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, now = None, loop.time()
        try:
            while self._due and (first := next(iter(self._due.items())))[1][0] <= now:
                key, (_, callback) = first
                del self._due[key]
                callback()
        finally:
            if self._timer is not None:  # a callback has set something, which is due after what is left
                self._timer.cancel()
            left = next(iter(self._due.values()), None)
            self._timer = None if left is None else loop.call_at(left[0], self._ring, loop)
