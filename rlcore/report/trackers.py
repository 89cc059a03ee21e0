"""The trackers of a run, which get its metrics in addition to metrics.jsonl.

They run in a separate thread: some talk to a server, some keep their run in a thread-local variable, and none may
delay or end a training run. A tracker that fails after the start is named in a warning and switched off.
"""

import asyncio
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlcore.contracts.tracking import Setting, TrackContext, TrackedSample, Tracker
from rlcore.errors import ConfigError, RlcoreError, boundary
from rlcore.errors.redaction import redact
from rlcore.plan import CORE, TrackerPlan

START_S = 60.0
"""Seconds a tracker may take to start."""
CLOSE_S = 5.0
"""Seconds that all trackers together may take to finish when the run ends."""
MOST_WAITING = 1000
"""Most calls that wait for slow or stuck trackers; further metrics go only to metrics.jsonl."""

logger = logging.getLogger(__name__)

Problem = RlcoreError | None


class Trackers:
    """The trackers of `track.to`; nothing runs before `start`."""

    def __init__(
        self,
        plans: Sequence[TrackerPlan],
        project: str,
        run_dir: Path,
        run_config: str,
        *,
        warn: Callable[[str], None] = logger.warning,
        find: Callable[[str], object | None] = importlib.util.find_spec,
    ) -> None:
        """`run_config` is YAML, which every tracker gets when it starts."""
        self._plans, self._project, self._run_dir, self._run_config = plans, project, run_dir, run_config
        self._warn, self._find = warn, find
        self._trackers: dict[str, Tracker] = {}
        """The trackers by their names in errors."""
        self._thread: DaemonThread | None = None
        self._failed: set[str] = set()
        """Trackers that get no further calls except `close`."""
        self._without_samples: set[str] = set()
        """Trackers that failed to take samples."""
        self._is_behind = False

    async def start(self) -> None:
        """Start every tracker with the configuration; ConfigError if one is not installed or fails.

        A signal that ends the run also ends the wait for a tracker that does not start.
        """
        if not self._plans:
            return
        require_installed(self._plans, self._find)
        self._thread = DaemonThread("trackers")
        self._thread.start()
        settings = _flat(self._run_config)
        for plan in self._plans:
            await self._start(plan, settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics; returns immediately."""
        if self._thread is not None and self._has_room(step):
            values = dict(metrics)
            self._thread.submit(lambda: self._log(step, values))

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        """Hand over samples; returns immediately."""
        if self._thread is not None and samples and self._has_room(step):
            self._thread.submit(lambda: self._log_samples(step, samples))

    def _has_room(self, step: int) -> bool:
        """False while too many calls wait; warns at the first of them."""
        behind = self._thread is not None and self._thread.num_waiting >= MOST_WAITING
        if behind and not self._is_behind:
            names = ", ".join(who for who in self._trackers if who not in self._failed)
            self._warn(
                f"{names}: {MOST_WAITING} calls behind; from step {step} on it gets nothing until there is room, "
                "metrics.jsonl has everything"
            )
        self._is_behind = behind
        return not behind

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Close every tracker, but wait at most `limit_s`; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None and not thread.end(self._close, limit_s):
            self._warn(f"{', '.join(self._trackers) or 'trackers'}: not finished within {limit_s:g} s; left behind")

    async def _start(self, plan: TrackerPlan, settings: Mapping[str, Setting]) -> None:
        who, name = _named(plan), plan.offer.name

        def start() -> Problem:
            with _caught(f"track.to: {who} did not start", ConfigError) as problems:
                context = TrackContext(name, self._project, self._run_dir.name, self._run_dir, plan.section)
                tracker = plan.offer.cls(context)
                tracker.start(dict(settings))
                self._trackers[who] = tracker
            return problems[0] if problems else None

        thread = self._thread
        if thread is None:
            return
        started = asyncio.wrap_future(thread.submit(start))
        done, _ = await asyncio.wait({started}, timeout=START_S)  # which leaves the thread's future as it is
        problem = started.result() if done else ConfigError(f"track.to: {who} did not start within {START_S:g} s")
        if problem is not None:
            self.close()
            raise problem

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {redact(name): value for name, value in metrics.items()}  # services name some of them
        for who, tracker in self._trackers.items():
            if who in self._failed:
                continue
            with _caught(who, RlcoreError) as problems:
                tracker.log(step, dict(values))
            if problems:
                self._failed.add(who)
                self._warn(f"{problems[0]}; it is switched off, metrics.jsonl has everything")

    def _log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        for who, tracker in self._trackers.items():
            if who in self._failed | self._without_samples:
                continue
            with _caught(f"{who}: samples", RlcoreError) as problems:
                tracker.log_samples(step, list(samples))
            if problems:
                self._without_samples.add(who)
                self._warn(f"{problems[0]}; it gets only metrics, trajectories/ has all samples")

    def _close(self) -> None:
        for who, tracker in self._trackers.items():
            with _caught(f"{who} at the end", RlcoreError) as problems:
                tracker.close()
            if problems:
                self._warn(str(problems[0]))


def require_installed(
    plans: Sequence[TrackerPlan], find: Callable[[str], object | None] = importlib.util.find_spec
) -> None:
    """ConfigError with the install line if the package of a tracker is missing."""
    for plan in plans:
        package = plan.offer.package
        if package and find(package) is None:
            raise ConfigError(
                f"track.to: {_named(plan)} needs {package}, which is not installed; install it with: pip install "
                f"{package}"
            )


def _named(plan: TrackerPlan) -> str:
    """The tracker's name in errors, with its plugin if that is not the core."""
    of = "" if plan.provided_by.startswith(f"plugin '{CORE}' ") else f" of {plan.provided_by}"
    return f"tracker {plan.offer.name}{of}"


class DaemonThread:
    """Runs submitted functions one after another; does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start to run submitted functions."""
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """The future result of `work`, which handles its own errors."""
        future: Future[Any] = Future()
        self._queue.put((future, work))
        return future

    @property
    def num_waiting(self) -> int:
        """Number of functions that are submitted but not started."""
        return self._queue.qsize()

    def end(self, last: Callable[[], Any], limit_s: float) -> bool:
        """Run a last function behind the others; False if it has not ended within `limit_s`, and the thread is left
        behind."""
        done = self.submit(last)
        self._queue.put(None)
        in_time = bool(wait([done], limit_s).done)
        self._thread.join(0.5)
        return in_time

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            future, work = job
            future.set_result(work())


@contextmanager
def _caught(whose: str, error: type[RlcoreError]) -> Iterator[list[RlcoreError]]:
    """Run foreign code; its exceptions are added to the list as `error`."""
    problems: list[RlcoreError] = []
    try:
        with boundary(whose, error):
            yield problems
    except RlcoreError as problem:
        problems.append(problem)


def _flat(run_config: str) -> dict[str, Setting]:
    """The configuration by dotted key, with values that every tracker takes."""
    from omegaconf import OmegaConf

    flat: dict[str, Setting] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        else:
            flat[path] = value if isinstance(value, (bool, int, float, str)) else str(value)

    # unresolved: values of the environment are not for trackers
    walk(OmegaConf.to_container(OmegaConf.create(run_config), resolve=False), "")
    flat.pop("", None)
    return flat
