"""The clock of `rollout.deadline_s`: it counts only time in which samples could have been finished."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SamplingClock:
    """Starts again with each sample that arrives, of any call, and stands still while the actor works.

    So a call may wait for its turn behind others, and samples of the embedded sampler for updates. If no sample can
    arrive any more, steps soon wait for it, nothing else happens, and time runs out.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.since = 0.0
        """Time when it last started, on the event loop's clock. Set at each sample, without a call for each."""
        self._num_busy = 0
        """Replicas of the actor that work."""

    def restart(self) -> None:
        """Something has happened that samples may have waited for."""
        self.since = asyncio.get_running_loop().time()

    def actor_busy(self, by: int) -> None:
        """The number of the actor's replicas that work has changed."""
        self._num_busy += by
        self.restart()

    @contextmanager
    def limit(self, expire: Callable[[], None]) -> Iterator[None]:
        """Call `expire` when the block has lasted for `deadline_s` on this clock."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            now = loop.time()
            due = (now if self._num_busy else max(self.since, began)) + self.deadline_s
            if due > now:
                timer = loop.call_at(due, look)
            else:
                expire()

        timer = loop.call_at(began + self.deadline_s, look)
        try:
            yield
        finally:
            timer.cancel()
