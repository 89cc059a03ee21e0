"""Reports hanging calls of components: who, for how long, and the line where each waits."""

import asyncio
import gc
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rlcore.errors import RlcoreError
from rlcore.plan.time_limit import where_in

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Seconds that a report waits for the processes of a worker."""


def _running_task() -> "asyncio.Task[Any] | None":
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@dataclass(eq=False)
class WatchedCall:
    """A call in flight, or a stream whose next item is awaited."""

    who: str
    owes: str = "has not returned"
    thread: int = field(default_factory=threading.get_ident)
    task: "asyncio.Task[Any] | None" = field(default_factory=_running_task)
    began: float = field(default_factory=time.monotonic)
    num_warnings: int = 0
    pauses: int = 0
    ask: "Callable[[], Coroutine[Any, Any, str]] | None" = None
    """Asks a worker's processes where they are, on the loop of the call."""

    def pause(self) -> None:
        """Pause the clock: the call waits for its caller or its input."""
        self.pauses += 1

    def resume(self) -> None:
        """Restart the clock; a call that ends while paused need not be resumed."""
        self.pauses -= 1
        self.began, self.num_warnings = time.monotonic(), 0

    def resume_stream(self) -> None:
        """Resumes like `resume`, after a `yield` of the stream: another task may request the next item."""
        self.pauses -= 1
        self.began, self.num_warnings = time.monotonic(), 0
        self.thread, self.task = threading.get_ident(), asyncio.current_task()


class HangWatch:
    """Warns of calls in flight, after some seconds and again after each such period; calls continue.

    A thread checks them, so a call that blocks the event loop is reported, too. It starts with the first call. The time
    of a stream counts from its last item, excluding the time in which the caller processes that item or the stream
    waits for input.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._calls: set[WatchedCall] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(
        self,
        who: str,
        owes: str = "has not returned",
        ask: "Callable[[], Coroutine[Any, Any, str]] | None" = None,
    ) -> Iterator[WatchedCall]:
        """Watch a call of a component or worker until the block ends; `ask`: see `WatchedCall`."""
        call = WatchedCall(who, owes, ask=ask)
        self._calls.add(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="hang watch", daemon=True)
            self._thread.start()
        try:
            yield call
        finally:
            self._calls.discard(call)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(self._after_s / 4):
            now = time.monotonic()
            for call in tuple(self._calls):
                waited_s = now - call.began
                if not call.pauses and waited_s >= (call.num_warnings + 1) * self._after_s:
                    call.num_warnings = int(waited_s / self._after_s)
                    lines = _standing(call), _of_processes(call)
                    logger.warning("%s %s for %.3g s, %s%s", call.who, call.owes, waited_s, *lines)


def _of_processes(call: WatchedCall) -> str:
    """The end of a report: the ranks of a worker that do not answer or differ; empty if that cannot be found out."""
    if call.ask is None or call.task is None or call.task.done():
        return ""
    answer = asyncio.run_coroutine_threadsafe(call.ask(), call.task.get_loop())
    try:
        found = answer.result(ANSWER_S)
    except (TimeoutError, CancelledError, RlcoreError):
        answer.cancel()
        return ""
    return f"; {found}" if found else ""


def _standing(call: WatchedCall) -> str:
    """The innermost line outside the standard library at which the call waits or computes."""
    frames = _awaited_frames(call.task) if call.task else []
    running = sys._current_frames().get(call.thread)
    stack = list(_stack(running))
    if not frames or frames[-1] in stack:  # this is the running task
        frames = stack[::-1]
    return where_in(frames)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited_frames(task: "asyncio.Task[Any]") -> list[FrameType]:
    """The frames of a task, outermost first, followed through the awaited objects."""
    frames: list[FrameType] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        if inspect.iscoroutine(waiting):
            frame, after = waiting.cr_frame, waiting.cr_await
        elif inspect.isasyncgen(waiting):
            frame, after = waiting.ag_frame, waiting.ag_await
        else:  # the awaitable of `async for` refers to the generator, and to nothing else that waits
            inside = [generator for generator in gc.get_referents(waiting) if inspect.isasyncgen(generator)]
            frame, after = None, inside[0] if inside else None
        frames += [frame] if frame else []
        waiting = after
    return frames
