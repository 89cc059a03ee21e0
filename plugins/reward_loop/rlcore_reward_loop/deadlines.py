"""Ends calls that take too long: one timer for all of them, where `asyncio.timeout` has one for each."""

import asyncio
import time
from types import TracebackType

SHORTEST_S = 0.002
"""Between two looks at everything that is under way."""


class Deadline:
    """A block of one task, which is cancelled at `due`; leaving it after that raises TimeoutError."""

    __slots__ = ("_all", "_num_cancels", "due", "expired", "task")

    def __init__(self, deadlines: "Deadlines", due: float) -> None:
        self._all, self.due = deadlines, due
        self.expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline is of a task, and this is none")
        self.task, self._num_cancels = task, task.cancelling()
        self._all.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all.remove(self)
        # Somebody else's cancellation stays one.
        if self.expired and self.task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise TimeoutError from error


class Deadlines:
    """All deadlines of one owner, as `time.monotonic` counts."""

    def __init__(self) -> None:
        self._under_way: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = 0.0

    def until(self, due: float) -> Deadline:
        """`with deadlines.until(due)`: TimeoutError when the block has not ended by then."""
        return Deadline(self, due)

    def add(self, deadline: Deadline) -> None:
        """It has begun."""
        self._under_way[deadline] = None
        # A timer of an earlier deadline stays when that is kept: it finds nothing due, and looks further.
        if self._timer is None or deadline.due < self._looks_at:
            self._set(deadline.due)

    def remove(self, deadline: Deadline) -> None:
        """It has ended."""
        self._under_way.pop(deadline, None)

    def close(self) -> None:
        """Forget the timer; what is under way has no deadline any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        self.close()
        self._looks_at = due
        self._timer = asyncio.get_running_loop().call_later(due - time.monotonic(), self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for each in [each for each in self._under_way if each.due <= now]:
            del self._under_way[each]
            each.expired = True
            each.task.cancel()
        if self._under_way:
            self._set(max(now + SHORTEST_S, min(each.due for each in self._under_way)))
