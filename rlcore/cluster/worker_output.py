"""Forwards the output of a process into the log."""

import logging
import re
import time
from collections import deque

from rlcore.errors.redaction import clipped

logger = logging.getLogger(__name__)

MAX_LOG_LINES = 10_000
"""Maximum log lines of a process; further ones are dropped, with one note."""
MAX_LINE = 2000
MAX_CAUSE = 500
NUM_LAST_WORDS = 3
FRESH_S = 30.0
"""Seconds within which last words are of the end."""
NUM_RECENT = 100
"""Last lines in which an exception counts as the cause of the end; some engines print several tracebacks."""
EXCEPTION = re.compile(r"(^|[\s(])[A-Za-z_.]*(Error|Exception|Interrupt): ")
STACK = re.compile(
    r"\s+@\s|PC: @|\*\*\* SIG|\[.* logging\.cc:|Stack \(most recent|(Current )?[Tt]hread 0x|Extension modules:"
    r'|  File ".*", line \d+ in '
)
"""Lines of a crash to skip in last words: native frames, and those of Python's faulthandler."""


class WorkerOutput:
    """Logs the lines of one process under its name, within bounds, and remembers its last exceptions and lines."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_lines = 0
        self._printed_s = 0.0
        """Time of the last line, by the monotonic clock."""
        self._stdout, self._stderr, self._exceptions = (deque[tuple[int, str]](maxlen=NUM_LAST_WORDS) for _ in range(3))
        """The last lines of each kind, numbered; an exception is only in its own list."""

    def add(self, line: str, is_error: bool = False) -> None:
        """Add a line. `is_error`: it is from stderr, if that is separate from and unordered with stdout."""
        text = clipped(line, MAX_LINE).rstrip()
        self._num_lines += 1
        self._printed_s = time.monotonic()
        if text and not STACK.match(text):
            last = self._stderr if is_error else self._stdout
            (self._exceptions if EXCEPTION.search(text) else last).append((self._num_lines, text))
        if self._num_lines <= MAX_LOG_LINES:
            logger.info("%s: %s", self._name, text)
        elif self._num_lines == MAX_LOG_LINES + 1:
            logger.warning("%s: printed more than %d lines; the rest is dropped", self._name, MAX_LOG_LINES)

    def cause(self, error: str) -> str:
        """The tail of an error of the process: the last exception that it printed, if the error does not name it.

        An engine that starts further processes prints their exceptions, and raises one that only counts them.
        """
        found = [(text, EXCEPTION.search(text)) for _, text in self._exceptions]
        printed = [text[match.start() :].strip(" (") for text, match in found if match]
        unnamed = [text for text in printed if text not in error]
        return f"; it had printed: {clipped(unnamed[-1], MAX_CAUSE)}" if unnamed else ""

    @property
    def last_words(self) -> str:
        """The tail of an error that says how the process ended; empty when it has printed nothing.

        Contains its last line, earlier exceptions, and as many other lines as fit. States the age of the last line if
        that is above FRESH_S: the last words of a killed process may have nothing to do with its end.
        """
        lines = [*self._stdout, *self._stderr]
        recent = [exception for exception in self._exceptions if exception[0] > self._num_lines - NUM_RECENT]
        recent = recent[-(NUM_LAST_WORDS - bool(lines)) :]
        last = [*lines[len(recent) - NUM_LAST_WORDS :], *recent]
        age_s = time.monotonic() - self._printed_s
        before = f", {age_s:.0f} s before" if age_s > FRESH_S else ""
        return f"; its last words{before}: {' | '.join(text for _, text in sorted(last))}" if last else ""
