"""Durations of the null backend's models, so that a benchmark can subtract them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Busy:
    """A worker that counts what it computes."""

    busy_s = 0.0
    """CPU seconds so far of the blocks below."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The model is at work."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.busy_s += time.thread_time() - began
