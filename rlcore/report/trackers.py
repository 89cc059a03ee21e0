"""Trackers beside metrics.jsonl: tensorboard, wandb, mlflow and trackio, through accelerate's tracker classes.

They run in a separate thread: some talk to a server, some keep their run in a thread-local variable, and none may
hold up or end a training run. One that fails after the start is named in a warning and switched off.
"""

import importlib.util
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from rlcore.config import TrackConfig
from rlcore.errors import ConfigError, RlcoreError, boundary
from rlcore.report.tracked_samples import Rows, log_samples

START_S = 60.0
"""Seconds a tracker may take to start."""
CLOSE_S = 5.0
"""Seconds trackers may take, together, to write what is outstanding when the run ends."""

logger = logging.getLogger(__name__)

Problem = RlcoreError | None


class Tracker(Protocol):
    """The part of accelerate's GeneralTracker that is used here."""

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


MakeTracker = Callable[[str, str, Path, str], Tracker]


class Trackers:
    """The trackers of `track.to`; nothing runs before `start`."""

    def __init__(
        self,
        config: TrackConfig,
        run_dir: Path,
        run_name: str,
        run_config: str,
        *,
        warn: Callable[[str], None] = logger.warning,
        make: "MakeTracker | None" = None,
        find: Callable[[str], object | None] = importlib.util.find_spec,
    ) -> None:
        """`run_config` is YAML, which every tracker gets when it starts."""
        self._config, self._run_dir, self._run_name, self._run_config = config, run_dir, run_name, run_config
        self._warn, self._make, self._find = warn, make or make_tracker, find
        self._trackers: dict[str, Tracker] = {}
        self._thread: DaemonThread | None = None
        self._without_samples: set[str] = set()
        """Trackers that failed to take samples."""

    def start(self) -> None:
        """Starts every tracker and gives it the configuration; ConfigError if one is not installed or fails."""
        names = self._config.to
        if not names:
            return
        require_installed(names, self._find)
        self._thread = DaemonThread("trackers")
        self._thread.start()
        settings = _flat(self._run_config)
        for name in dict.fromkeys(names):
            build = partial(self._make, name, self._config.project, self._run_dir, self._run_name)
            self._start(name, build, settings)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics over; returns at once."""
        if self._thread is not None:
            values = dict(metrics)
            self._thread.submit(lambda: self._log(step, values))

    def log_samples(self, step: int, rows: Rows) -> None:
        """Hand samples over to the trackers that show text; returns at once."""
        if self._thread is not None and rows:
            self._thread.submit(lambda: self._log_samples(step, rows))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Finish every tracker, or leave behind what takes longer; more than once is harmless."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.submit(self._finish).result(limit_s)
        except TimeoutError:
            self._warn(f"trackers {', '.join(self._trackers)}: not finished within {limit_s:g} s; left behind")
        thread.end()

    def _start(self, name: str, build: Callable[[], Tracker], settings: dict[str, Any]) -> None:
        def start() -> Problem:
            with _caught(f"track.to: {name} did not start", ConfigError) as problems, _accelerate_state():
                tracker = build()
                tracker.start()
                tracker.store_init_configuration(_named_for(name, settings))
                self._trackers[name] = tracker
            return problems[0] if problems else None

        thread = self._thread
        if thread is None:
            return
        try:
            problem = thread.submit(start).result(START_S)
        except TimeoutError:
            problem = ConfigError(f"track.to: {name} did not start within {START_S:g} s")
        if problem is not None:
            self.close()
            raise problem

    def _log(self, step: int, values: dict[str, Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            with _caught(f"tracker {name}", RlcoreError) as problems, _accelerate_state():
                tracker.log(_named_for(name, values), step=step)
            if problems:
                del self._trackers[name]
                self._warn(f"{problems[0]}; it is switched off, metrics.jsonl has everything")

    def _log_samples(self, step: int, rows: Rows) -> None:
        for name, tracker in list(self._trackers.items()):
            if name in self._without_samples:
                continue
            with _caught(f"tracker {name}: samples", RlcoreError) as problems, _accelerate_state():
                log_samples(name, tracker, step, rows)
            if problems:
                self._without_samples.add(name)
                self._warn(f"{problems[0]}; it gets metrics alone, trajectories/ has all samples")

    def _finish(self) -> None:
        for name, tracker in list(self._trackers.items()):
            with _caught(f"tracker {name} at the end", RlcoreError) as problems, _accelerate_state():
                tracker.finish()
            if problems:
                self._warn(str(problems[0]))


def require_installed(names: tuple[str, ...], find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """ConfigError naming the install line when the package of a tracker is missing."""
    for name in names:
        if find(name) is None:
            raise ConfigError(f"track.to: {name} is not installed; install it with: pip install {name}")


def make_tracker(name: str, project: str, run_dir: Path, run_name: str) -> Tracker:
    """Accelerate's tracker of that name, not started; what it writes locally stands in the run directory."""
    from accelerate import tracking  # type: ignore[import-untyped]

    tracker: Tracker
    if name == "tensorboard":
        tracker = tracking.TensorBoardTracker("tensorboard", run_dir)
    elif name == "wandb":
        # one id for the life of the run directory: a resumed run goes on in the same wandb run
        id_file = run_dir / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        run_id = id_file.read_text().strip()
        tracker = tracking.WandBTracker(project, name=run_name, id=run_id, resume="allow", dir=str(run_dir))
    elif name == "mlflow":
        tracker = tracking.MLflowTracker(experiment_name=project, run_name=run_name)
    else:
        tracker = tracking.TrackioTracker(project, name=run_name, resume="allow")
    return tracker


class DaemonThread:
    """Runs what is submitted, one after another; does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin to run what is submitted."""
        self._thread.start()

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """The result to be; `work` handles its own errors."""
        future: Future[Any] = Future()
        self._queue.put((future, work))
        return future

    def end(self) -> None:
        """Take no more; a thread that is stuck is left behind."""
        self._queue.put(None)
        self._thread.join(0.5)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            future, work = job
            future.set_result(work())


def _named_for(tracker: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values under names that the tracker takes: mlflow refuses the @ of pass@8."""
    return {re.sub(r"[^\w\-. :/]", "_", name): v for name, v in values.items()} if tracker == "mlflow" else values


@contextmanager
def _caught(whose: str, error: type[RlcoreError]) -> Iterator[list[RlcoreError]]:
    """Runs foreign code; its exceptions are added to the list, worded as `error`."""
    problems: list[RlcoreError] = []
    try:
        with boundary(whose, error):
            yield problems
    except RlcoreError as problem:
        problems.append(problem)


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """The process state that accelerate's trackers ask for; when it does not exist, only while they run.

    Left behind, it would decide the device of an Accelerator that a plugin or a reward function makes later.
    """
    from accelerate import PartialState

    if PartialState._shared_state:
        yield
        return
    PartialState(cpu=True)
    try:
        yield
    finally:
        PartialState._reset_state()


def _flat(run_config: str) -> dict[str, Any]:
    """The configuration by dotted key, with values that every tracker takes."""
    from omegaconf import OmegaConf

    flat: dict[str, Any] = {}

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
