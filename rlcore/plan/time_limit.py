"""Interrupts plugin code that hangs while planning, and reports where it hung."""

import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from rlcore.errors import PluginError
from rlcore.errors.redaction import displayable

LIMIT = "RLCORE_PLUGIN_LIMIT_S"
"""The environment variable that sets the seconds that each import, hook and request of a plugin may take."""
DEFAULT_LIMIT_S = 30.0
_AGAIN_S = 1.0
"""Seconds between interruptions of code that continues in spite of them."""
_TRIES = 5
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


class _Hangs(BaseException):
    """Interrupts code that hangs; not an Exception, so that code which retries forever ends too."""


def limit_s() -> float:
    """Seconds that an import, a hook or `requests()` of a plugin may take."""
    text = os.environ.get(LIMIT, "")
    try:
        limit = float(text) if text else DEFAULT_LIMIT_S
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise PluginError(f"{LIMIT}: found '{text}'; needs a number of seconds above 0")
    return limit


@contextmanager
def limited(whose: str, limit: float | None = None, setting: str = LIMIT) -> Iterator[None]:
    """PluginError naming file, line and function when `whose` code takes longer than `limit`; None: `limit_s()`.

    `setting`: the setting that raises the limit.

    Uses a timer signal, so it works on the main thread only; other threads have no limit. An existing timer, such as a
    test runner's, continues afterwards.
    """
    limit, began = limit_s() if limit is None else limit, time.monotonic()
    was_left, was_interval = signal.getitimer(signal.ITIMER_REAL)
    if threading.current_thread() is not threading.main_thread() or 0 < was_left <= limit:
        yield
        return
    lines: list[str] = []
    running = True

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not running:
            return
        lines.append(not_done(whose, limit, frame, setting))
        if len(lines) > _TRIES:
            _end(lines[0])
        raise _Hangs

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit, _AGAIN_S)
    try:
        yield
    finally:
        running = False
        left = max(was_left - (time.monotonic() - began), 1e-3) if was_left else 0.0
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        signal.setitimer(signal.ITIMER_REAL, left, was_interval)
        if lines:  # even if the code swallows the interruption
            raise PluginError(lines[0])


def not_done(whose: str, limit: float, frame: FrameType | None, setting: str = LIMIT) -> str:
    """The error of code that takes longer than a limit: whose, its line, and the setting that raises the limit."""
    return f"{whose}: not done after {limit:g} s, {_where(frame)}; if it is only slow, set {setting} to more"


def _where(frame: FrameType | None) -> str:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return where_in(frames[::-1])


def where_in(frames: Sequence[FrameType]) -> str:
    """The waiting line: that of the innermost frame outside the standard library, else of the last frame."""
    theirs = [frame for frame in frames if not _is_library(frame.f_code.co_filename)] or frames
    if not theirs:
        return "nowhere in Python"
    return f"in {theirs[-1].f_code.co_name} at {theirs[-1].f_code.co_filename}:{theirs[-1].f_lineno}"


def _is_library(file: str) -> bool:
    return file.startswith("<frozen") or (file.startswith(_STDLIB) and "-packages" not in file)


def _end(line: str) -> NoReturn:
    """Ends the process, because the code catches every interruption."""
    sys.stdout.flush()
    sys.stderr.write(f"rlcore: {displayable(line)}\n")
    sys.stderr.flush()
    os._exit(2)
