"""Forwards actors' output, published by Ray's log monitor on each node, into the log of the run."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray._private.worker import global_worker

from rlcore.cluster.kit import WorkerOutput
from rlcore_ray.actor import END_OF_OUTPUT

logger = logging.getLogger(__name__)

RAYS_OWN = "ray_print_logs"
"""Ray's log handler, which prints everything to the terminal."""
MAX_EARLY = 1000
"""Lines kept of a process that is not assigned to a worker yet."""
QUIET_S = 1.0
"""Seconds without a new line after which a dead actor's output counts as complete; files are read every 0.1 s."""
LAST_S = 3.0
"""Seconds after which the wait for last words, or for the end of the output, stops."""
POLL_S = 0.05


@dataclass(frozen=True)
class ProcessPlace:
    """The node and process of an actor."""

    node: str
    process: int

    def __str__(self) -> str:
        return f"process {self.process} on {self.node}"


class _Heard:
    """The output so far of one process."""

    def __init__(self, name: str) -> None:
        self.printed = WorkerOutput(name)
        self.last_at = time.monotonic()
        self.streams_ended = 0


class ActorOutput:
    """The lines of every actor of a run. Ray delivers them in a separate thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[ProcessPlace, _Heard] = {}
        self._early: deque[tuple[ProcessPlace, str, bool]] = deque(maxlen=MAX_EARLY)
        self._listening = False
        self._handler = f"rlcore {id(self)}"
        self._rays_own: Callable[[Any], None] | None = None
        """Ray's log handler, while another one stands for it."""

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Inside, `ray.init()` connects; later output arrives here instead of being printed."""
        self._listen()
        yield
        dispatcher.remove_handler(RAYS_OWN)

    def join(self) -> None:
        """Listen to a Ray that was already connected, which prints as before except for END_OF_OUTPUT."""
        if hasattr(global_worker, "logger_thread"):
            self._hide_ends()
            self._listen()
        else:
            logger.warning(
                "what workers print stays in Ray's logs, /tmp/ray/session_latest/logs on their node: ray.init() was "
                "called with log_to_driver=False"
            )

    def _hide_ends(self) -> None:
        for name, handler in dispatcher.handlers:
            if name == RAYS_OWN:
                self._rays_own = handler
                dispatcher.remove_handler(RAYS_OWN)
                dispatcher.add_handler(RAYS_OWN, partial(_without_ends, handler))

    def _listen(self) -> None:
        self._listening = True
        dispatcher.add_handler(self._handler, self._arrived)

    def close(self) -> None:
        """Stop listening."""
        if self._listening:
            dispatcher.remove_handler(self._handler)
        if self._rays_own is not None and any(name == RAYS_OWN for name, _ in dispatcher.handlers):
            dispatcher.remove_handler(RAYS_OWN)
            dispatcher.add_handler(RAYS_OWN, self._rays_own)
        self._listening = False

    def expect(self, place: ProcessPlace, name: str) -> None:
        """Log the lines of that process under this name, including those that have already arrived."""
        with self._lock:
            self._heard[place] = _Heard(name)
            for where, line, is_error in self._early:
                if where == place:
                    self._take(self._heard[place], line, is_error)
            self._early = deque((line for line in self._early if line[0] != place), MAX_EARLY)

    async def last_words(self, place: ProcessPlace | None) -> str:
        """The last output of a process that has ended, like `WorkerOutput.last_words`.

        Waits until no line has arrived for QUIET_S seconds, at most LAST_S.
        """
        printed = await self._printed(place)
        return printed.last_words if printed else ""

    async def cause(self, place: ProcessPlace, error: str) -> str:
        """The tail of an error of a process, like `WorkerOutput.cause`; waits as `last_words` does."""
        printed = await self._printed(place)
        return printed.cause(error) if printed else ""

    async def _printed(self, place: ProcessPlace | None) -> WorkerOutput | None:
        """The output of a process, when no line of it has arrived for a while; None if its output is not read."""
        began = time.monotonic()
        with self._lock:
            heard = self._heard.get(place) if place else None
        if heard is None or not self._listening:
            return None
        while (now := time.monotonic()) < min(max(heard.last_at, began) + QUIET_S, began + LAST_S):
            await asyncio.sleep(min(POLL_S, began + LAST_S - now))
        return heard.printed

    async def until_end(self, places: Sequence[ProcessPlace]) -> None:
        """Return when all output of these closed processes has arrived, or after LAST_S."""
        ends_at = time.monotonic() + LAST_S
        with self._lock:
            waiting = [self._heard[place] for place in places if place in self._heard]
        while self._listening and time.monotonic() < ends_at:
            if all(waiter.streams_ended >= 2 for waiter in waiting):
                return
            await asyncio.sleep(POLL_S)

    def _arrived(self, message: Mapping[str, Any]) -> None:
        if not str(message["pid"]).isdecimal():  # Ray's servers have names instead of numbers
            return
        place = ProcessPlace(str(message["ip"]), int(message["pid"]))
        with self._lock:
            heard = self._heard.get(place)
            for line in message["lines"]:
                if heard is None:
                    self._early.append((place, line, message["is_err"]))
                else:
                    self._take(heard, line, message["is_err"])

    def _take(self, heard: _Heard, line: str, is_error: bool) -> None:
        heard.last_at = time.monotonic()
        text = line.removesuffix(END_OF_OUTPUT)
        heard.streams_ended += text != line
        if text or text == line:
            heard.printed.add(text, is_error)


def _without_ends(handler: Callable[[Any], None], message: Mapping[str, Any]) -> None:
    """Give the handler the lines without the marks of the end of an actor's output."""
    lines = [text for line in message["lines"] if (text := line.removesuffix(END_OF_OUTPUT)) or text == line]
    if lines:
        handler({**message, "lines": lines})
