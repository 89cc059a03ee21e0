"""Finds and names the async reward function that blocks the run's event loop."""

import logging
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
BLOCKED_S = 0.5
"""A function that blocks the loop for longer than this between two awaits gets a warning."""
WINDOW_S = 5.0
"""Seconds over which the steps of a function are summed: many short ones hold up other calls like a long one."""
SHARE = 0.5
"""A function whose steps take more than this share of a window gets a warning."""


class LoopWatch:
    """Times every step of the watched coroutines; a thread detects steps that do not end."""

    def __init__(self, blocked_s: float = BLOCKED_S, window_s: float = WINDOW_S) -> None:
        self.blocked_s, self._window_s = blocked_s, window_s
        self._window_began = 0.0
        self._spent: dict[str, tuple[float, int]] = {}
        """Seconds and number of the steps of each function in the window."""
        self._longest_s = 0.0
        self._step: tuple[str, float] | None = None
        """Function and start of the current step."""
        self._warned: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch the running loop."""
        if self._thread is None:
            self._stop.clear()
            loop_thread = threading.get_ident()
            self._thread = threading.Thread(target=self._look, args=(loop_thread,), name="loop watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_longest_s(self) -> float:
        """The longest step since the last call of this method."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    def watched(self, name: str, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """The coroutine's result; each of its steps is timed."""
        return _Timed(self, name, coroutine)

    def begin(self, name: str) -> None:
        """Record the start of a step of this function."""
        now = time.monotonic()
        if now - self._window_began > self._window_s:
            self._window_began = now
            self._spent.clear()
        self._step = (name, now)

    def end(self) -> None:
        """Record the end of the step."""
        if self._step is not None:
            name, began = self._step
            self._step = None
            now = time.monotonic()
            took = now - began
            self._longest_s = max(self._longest_s, took)
            if took > self.blocked_s:
                self._warn(name, f"blocked the event loop for {took:.1f} s")
            spent_s, num = self._spent.get(name, (0.0, 0))
            self._spent[name] = spent_s + took, num + 1
            if spent_s + took > SHARE * self._window_s:
                window_s = now - self._window_began
                what = f"blocked the event loop for {spent_s + took:.2g} of {window_s:.2g} s, in {num + 1} short steps"
                self._warn(name, what)

    def _look(self, loop_thread: int) -> None:
        while not self._stop.wait(self.blocked_s / 2):
            step = self._step
            if step is not None and time.monotonic() - step[1] > self.blocked_s:
                frame = sys._current_frames().get(loop_thread)
                where = f", now at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
                self._warn(step[0], f"has blocked the event loop for more than {self.blocked_s:g} s{where}")

    def _warn(self, name: str, what: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "async reward function '%s' %s: every other call waits for it; await what takes time, or make it a "
                "plain function, which runs in a separate process",
                name,
                what,
            )


class _Timed(Generator[Any, Any, T]):
    """Awaits a coroutine, and reports each of its steps to the watch."""

    def __init__(self, watch: LoopWatch, name: str, coroutine: Coroutine[Any, Any, T]) -> None:
        self._watch, self._name, self._coroutine = watch, name, coroutine

    def __await__(self) -> "Generator[Any, Any, T]":
        return self

    def __next__(self) -> Any:  # Generator's takes one more call, and most coroutines have only this step
        return self._step(self._coroutine.send, None)

    def send(self, value: Any, /) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None, /) -> Any:
        return self._step(self._coroutine.throw, kind if value is None else value)

    def _step(self, step: Callable[[Any], Any], argument: Any) -> Any:
        self._watch.begin(self._name)
        try:
            return step(argument)
        finally:
            self._watch.end()

    def close(self) -> None:
        self._coroutine.close()
