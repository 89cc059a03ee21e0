"""SIGTERM and Ctrl-C: the first ends the run cleanly, the second ends the process immediately, also while foreign code
blocks the event loop. SIGHUP has no effect on the run."""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlcore.errors.redaction import displayable
from rlcore.plan.time_limit import where_in

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BLOCKED_S = 3.0
"""Seconds after a signal in which the event loop takes it, unless code blocks the loop."""
REPEATED_S = 0.5
"""Seconds after a signal in which another is the same one: `timeout` sends it to the process and to its group."""

logger = logging.getLogger(__name__)


def name_of(signum: int) -> str:
    """The name of a signal as a reader knows it."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


class Stopped(Exception):
    """The run was ended by a signal; `str()` says what was saved and how to continue."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells expect: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + self.signum


class StopRequest:
    """A signal's request to end the run; with `finish_step` the current step is finished first."""

    def __init__(self, finish_step: bool) -> None:
        self.signum: int | None = None
        """Set by the handler, which runs between any two lines of the run."""
        self.pending = False
        """True when the run is to end after this step; set by the event loop, which cancels the run at the same time. A
        run that ended itself before would be cancelled while it saves."""
        self.remains: Callable[[], str] = lambda: "no step was taken"
        """Says what is left of a run that ends now. It must read no file: a file system may be what hangs."""
        self._finish_step = finish_step
        self._received_at = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals for the running task; only the main thread can, in any other nothing is done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("signals are handled for a running task")
        before = {signum: signal.getsignal(signum) for signum in (*SIGNALS, signal.SIGHUP)}
        for signum in SIGNALS:
            signal.signal(signum, lambda number, frame: self._receive(number, loop, task))
        loop.add_signal_handler(signal.SIGHUP, _outlive_terminal)  # from now on every signal wakes the loop
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # a plugin, or a library, may have blocked them
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            for signum, handler in before.items():
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # None: it is C code's

    def _receive(self, signum: int, loop: asyncio.AbstractEventLoop, task: "asyncio.Task[object]") -> None:
        if self.signum is not None and time.monotonic() - self._received_at < REPEATED_S:
            return
        if self.signum is not None:
            # Not through sys.stderr: whatever holds the first one up may hold its lock.
            remains = displayable(self.remains())
            os.write(2, f"\nrlcore: ended at once by a second {name_of(signum)}; {remains}\n".encode())
            os._exit(128 + signum)
        self.signum, self._received_at = signum, time.monotonic()
        blocked = threading.Timer(BLOCKED_S, _report_blocked, (name_of(signum), threading.get_ident()))
        blocked.daemon = True
        blocked.start()
        loop.call_soon_threadsafe(self._take, blocked, task)

    def _take(self, blocked: threading.Timer, task: "asyncio.Task[object]") -> None:
        blocked.cancel()
        self.pending = True
        if not self._finish_step:
            task.cancel()


def _report_blocked(name: str, thread: int) -> None:
    stack = [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(thread))]
    words = displayable(f"rlcore: {name} waits for code {where_in(stack[::-1])}; a second {name} ends the run")
    os.write(2, f"\n{words}\n".encode())


def _outlive_terminal() -> None:
    logger.warning("the terminal has gone (SIGHUP); training continues, `kill %d` ends it", os.getpid())
