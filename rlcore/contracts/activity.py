"""Work in progress in a run: phases, workers' calls, rewards and tools, for `rlcore where` and the trace.

A component reports each call to a service, tool or environment:

    activity = current_activity()
    key = activity.begin(TOOL, "search", sample=trajectory_id)
    try:
        ...
    finally:
        activity.end(key)

Outside a run, such as in a child process, the activity is not read. All times are `time.monotonic`.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from rlcore.contracts.workers import WorkerGroup
from rlcore.types import TrajectoryId

Record = Literal["all", "steps", "none"]

STEP, PHASE, CALL, SAMPLE, REWARD, TOOL = "step", "phase", "call", "sample", "reward", "tool"
ENVIRONMENT = "environment"
AGENT = "agent"
"""Kinds of work: a step, a phase of a step, a worker's call, a sample, calls of rewards, tools and environments, and an
agent's program between its requests to the policy."""
WAITED_FOR = frozenset({REWARD, TOOL, ENVIRONMENT, AGENT})
"""Kinds that samples wait for."""
PER_SAMPLE = frozenset({SAMPLE}) | WAITED_FOR
"""Kinds with at least one span per sample in a step."""
MOST_SPANS = 100_000
"""The most spans that are kept until the step's trace is written; further ones are only counted."""


class BegunWork(NamedTuple):
    """Work that has begun."""

    kind: str
    who: str
    """The replica, scorer, tool or environment that works."""
    what: str
    """The method; empty where `who` is enough."""
    sample: TrajectoryId | None
    """The sample, or the first of several."""
    num: int
    """Samples that wait for it."""
    began: float


_Begun = tuple[str, str, str, TrajectoryId | None, int, float]
"""The fields of a `BegunWork`, without the cost of its constructor."""


class Span(NamedTuple):
    """A piece of work with the time of its end."""

    work: BegunWork
    ended: float


class EndedWork(NamedTuple):
    """All work that ended between two calls of `Activity.take`."""

    ended: "list[tuple[_Begun, float]]"
    later: list[Callable[[], Iterable[Span]]]
    num_left_out: int
    """Spans beyond the limit, which were dropped."""

    def spans(self) -> list[Span]:
        """All spans, unordered; called by the thread that writes them."""
        found = [Span(BegunWork(*work), at) for work, at in self.ended]
        return found + list(itertools.chain.from_iterable(listed() for listed in self.later))


class SampleCounts(NamedTuple):
    """Samples of the current step or evaluation."""

    issued: int = 0
    sampled: int = 0
    scored: int = 0


class Activity:
    """Records work in progress, and work that has ended since the last `take`.

    Everything may be read from other threads. A per-sample call costs two Python function calls.
    """

    def __init__(self, record: Record = "none") -> None:
        self.record = record
        self.phase = ""
        self.phase_began = time.monotonic()
        self.step = 0
        """The current step; 0 before the first."""
        self.step_began = self.phase_began
        self.total_steps = 0
        self.updated = 0
        """Updates made in the current step."""
        self.num_updates = 0
        """Updates per step."""
        self.unix_offset = time.time() - time.monotonic()
        """Seconds to add to a time of this activity to get the time since 1970."""
        self.counts: Callable[[], SampleCounts] = SampleCounts
        self.groups: dict[str, WorkerGroup[Any]] = {}
        """The run's workers by role."""
        self.num_left_out = 0
        """Spans since the last `take` that were dropped."""
        self._step_s: deque[float] = deque(maxlen=20)
        self._step_ended = 0.0
        self._keys = itertools.count()
        self._open: dict[int, _Begun] = {}
        self._elsewhere: dict[int, Sequence[BegunWork]] = {}
        self._ended: list[tuple[_Begun, float]] = []
        self._later: list[Callable[[], Iterable[Span]]] = []

    def new_key(self) -> int:
        """A unique number."""
        return next(self._keys)

    def begin(self, kind: str, who: str, what: str = "", sample: TrajectoryId | None = None, num: int = 1) -> int:
        """Start work that `num` samples wait for; returns the key for `end`."""
        key = next(self._keys)
        self._open[key] = (kind, who, what, sample, num, time.monotonic())
        return key

    def end(self, key: int) -> None:
        """End the work, with or without an error."""
        work = self._open.pop(key)
        if self.record == "all" or (self.record == "steps" and work[0] not in PER_SAMPLE):
            if len(self._ended) < MOST_SPANS:
                self._ended.append((work, time.monotonic()))
            else:
                self.num_left_out += 1

    def end_later(self, spans: Callable[[], Iterable[Span]]) -> None:
        """Add spans lazily: the thread that writes the trace requests them."""
        if self.record == "all" and len(self._later) < MOST_SPANS:
            self._later.append(spans)

    def enter(self, phase: str) -> None:
        """Start a phase; the previous one has ended."""
        now = time.monotonic()
        self._close(PHASE, self.phase, self.phase_began, now)
        self.phase, self.phase_began = phase, now

    def begin_step(self, step: int) -> None:
        """Start a step, in its sampling phase."""
        self.step, self.updated = step, 0
        self.enter("sampling")
        self.step_began = self.phase_began
        self._step_ended = self._step_ended or self.step_began

    def end_step(self) -> None:
        """End the step."""
        self.enter("between steps")
        now = self.phase_began
        self._close(STEP, f"step {self.step}", self.step_began, now)
        self._step_s.append(now - self._step_ended)
        self._step_ended = now

    @property
    def step_s(self) -> float:
        """Mean seconds per step over the last 20 steps, with the time between steps; 0 before the first one ends."""
        seconds = list(self._step_s)
        return sum(seconds) / len(seconds) if seconds else 0.0

    @contextmanager
    def counting(self, counts: Callable[[], SampleCounts], phase: str) -> Iterator[None]:
        """A context in which the run is in this phase, and these counts replace the current ones."""
        before, phase_before, self.counts = self.counts, self.phase, counts
        self.enter(phase)
        try:
            yield
        finally:
            self.counts = before
            self.enter(phase_before)

    def open_work(self) -> list[BegunWork]:
        """The work that has begun and not ended, here and elsewhere."""
        here = [BegunWork(*work) for work in list(self._open.values())]
        return [*here, *itertools.chain.from_iterable(list(self._elsewhere.values()))]

    def show_elsewhere(self, key: int, works: Sequence[BegunWork]) -> None:
        """Show work in progress in another process. It replaces the earlier work under this key; () removes that.

        The other process adds its spans with `end_later`.
        """
        if works:
            self._elsewhere[key] = works
        else:
            self._elsewhere.pop(key, None)

    def take(self) -> "EndedWork":
        """The work that has ended since the last call."""
        taken = EndedWork(self._ended, self._later, self.num_left_out)
        self._ended, self._later, self.num_left_out = [], [], 0
        return taken

    def _close(self, kind: str, who: str, began: float, ended: float) -> None:
        if who and self.record != "none":
            self._ended.append(((kind, who, "", None, 1, began), ended))


def summed(works: Iterable[BegunWork]) -> list[BegunWork]:
    """One entry per reward, tool, environment and agent: all samples that wait for it, since the start of the longest
    wait."""
    found: dict[tuple[str, str], BegunWork] = {}
    for work in works:
        if work.kind in WAITED_FOR:
            key = work.kind, work.who
            first = found.get(key, work._replace(what="", sample=None, num=0))
            found[key] = first._replace(num=first.num + work.num, began=min(first.began, work.began))
    return list(found.values())


_CURRENT: ContextVar[Activity] = ContextVar("activity")
_UNREAD = Activity()


def current_activity() -> Activity:
    """The activity of the run that this code works for."""
    return _CURRENT.get(_UNREAD)


@contextmanager
def as_current(activity: Activity) -> Iterator[None]:
    """Makes this the current activity in the context, and in tasks and threads that begin there."""
    token = _CURRENT.set(activity)
    try:
        yield
    finally:
        _CURRENT.reset(token)
