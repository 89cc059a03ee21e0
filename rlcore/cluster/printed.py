"""What a process prints, on its way into the log."""

import logging
import re
from collections import deque

logger = logging.getLogger(__name__)

MAX_LOG_LINES = 10_000
"""Lines that a process may print into the log; further ones are dropped, and that is said once."""
MAX_LINE = 2000
NUM_LAST_WORDS = 3
STACK = re.compile(
    r"\s+@\s|PC: @|\*\*\* SIG|\[.* logging\.cc:|Stack \(most recent|(Current )?[Tt]hread 0x|Extension modules:"
    r'|  File ".*", line \d+ in '
)
"""Lines of a crash that are no last words: native frames, and those of Python's faulthandler."""


class Printed:
    """Logs the lines of one process under its name, within bounds, and remembers the last of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_lines = 0
        self._last: tuple[deque[str], deque[str]] = (deque(maxlen=NUM_LAST_WORDS), deque(maxlen=NUM_LAST_WORDS))

    def add(self, line: str, is_error: bool = False) -> None:
        """One line, as it came. `is_error`: of stderr, where that comes by itself and in no order with stdout."""
        text = line[:MAX_LINE].rstrip()
        self._num_lines += 1
        if text and not STACK.match(text):
            self._last[is_error].append(text)
        if self._num_lines <= MAX_LOG_LINES:
            logger.info("%s: %s", self._name, text)
        elif self._num_lines == MAX_LOG_LINES + 1:
            logger.warning("%s: printed more than %d lines; the rest is dropped", self._name, MAX_LOG_LINES)

    @property
    def last_words(self) -> str:
        """The tail of an error that says how the process ended: its last lines; empty when it has printed nothing."""
        last = [*self._last[False], *self._last[True]][-NUM_LAST_WORDS:]
        return f"; its last words: {' | '.join(last)}" if last else ""
