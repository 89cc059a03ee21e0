"""Durations of the null backend's models, so that a benchmark can subtract them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Busy:
    """A worker that measures its CPU time."""

    busy_s = 0.0
    """CPU seconds spent so far in blocks of `busy`."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts the block's CPU time."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.busy_s += time.thread_time() - began
