"""The directory of a run: chooses it, rejects one with a run in it, locks it, and removes it if no run began."""

import asyncio
import fcntl
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType

from rlcore.config import LoadedConfig
from rlcore.config.names import run_directory
from rlcore.config.providers import Provider
from rlcore.errors import ConfigError, RlcoreError, WorkerError, describe, foreign_trace, nearest
from rlcore.errors.redaction import DisplayFormatter
from rlcore.plan import RunPlan, plan_to_json
from rlcore.report import foreign_output
from rlcore.report.files import write_atomically
from rlcore.report.metrics import METRICS, TRAJECTORIES, has_results, writing_records
from rlcore.report.status import LOCK, STATUS
from rlcore.report.token_log import TOKENS, VOCABULARY
from rlcore.report.trace import OLDER_TRACE, TRACE
from rlcore.reward.provenance import copy_reward_files, reward_provenance
from rlcore.train.signals import Stopped

LOG = "log.txt"
READ_WHOLE = ("config.yaml", "plan.json", "rewards.json", STATUS, TRACE, OLDER_TRACE, f"{TOKENS}/{VOCABULARY}")
"""Files that a run writes and, on resume, reads as a whole."""
WRITTEN = (LOCK, LOG, METRICS, "reward_calls.jsonl", "wandb_id.txt", *READ_WHOLE)
"""Files that a run writes, apart from those of its steps; the target of a link would be overwritten."""
OF_STEPS = (TRAJECTORIES, TOKENS, "rewards")
"""Directories whose files a run writes, and cuts back on resume."""
OF_PARTS = ("weights", "tensorboard", "wandb")
"""Directories that the weight sync, which also removes versions, and trackers write."""
MOST_BYTES = 1 << 30
"""Bytes that a file which is read as a whole may have; those of runs have less than 100 MB."""
ENDED = "the run ended by an error"
"""Text in log.txt before the error that the terminal shows as well."""
EXPLAINS = re.compile(
    r"(notes|layout\.reason|choices\.[\w.]+\.(reason|set_by)|facts\.gpu_free_bytes|config\.train\.dir): "
)
"""Beginnings of differences that change nothing: explanations, origins (a resume reads choices from config.yaml), the
memory that was free when a run was planned, and the place where the run now is."""
LOCK_TRIES, LOCK_PAUSE_S = 20, 0.01
"""The question whether a run is held (`report.status.is_held`) takes its lock for a moment."""
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TRACEBACK = re.compile(r"[ |+]*(Exception Group )?Traceback")


def choose_directory(loaded: LoadedConfig, resume: bool) -> Path:
    """The run directory: `train.dir`/`train.name`, or a name made of the configuration's stem and the UTC time.

    Such a name is claimed by making the directory, so two starts in one second have two. With `resume` and no name, the
    newest run of that stem; ConfigError when there is none. The path is absolute, for workers do not always share this
    process's working directory.
    """
    train, now = loaded.config.train, datetime.now(UTC)
    fresh = run_directory(train, loaded.files, now).absolute()
    if train.name:
        return fresh
    if not resume:
        return _claimed(fresh)
    stem = fresh.name.removesuffix(f"{now:-%Y%m%d-%H%M%S}")
    name = re.compile(re.escape(stem) + r"-(\d{8}-\d{6})(?:-(\d+))?")
    found = [(path.parent, name.fullmatch(path.parent.name)) for path in fresh.parent.glob("*/config.yaml")]
    runs = [path for _, _, path in sorted((at[1], int(at[2] or 1), path) for path, at in found if at)]
    if not runs:
        raise ConfigError(
            f"--resume: no run '{stem}-*' is in '{train.dir}'; name the run with train.name=..., or begin a run"
        )
    return runs[-1]


def _claimed(directory: Path) -> Path:
    """Creates a directory with that name, or with the next free one: NAME-2, NAME-3."""
    with _making(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = directory if number == 1 else directory.with_name(f"{directory.name}-{number}")
        with _making(path), suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("counting does not end")


@contextmanager
def _making(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        raise ConfigError(
            f"train.dir: the run directory '{directory}' cannot be made ({describe(cause)}); needs a directory that "
            "can be written to; choose another"
        ) from cause


def open_directory(directory: Path, resume: bool) -> Path:
    """The directory, made if it is new; ConfigError as `check_directory` says."""
    check_directory(directory, resume)
    with _making(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def check_directory(directory: Path, resume: bool) -> None:
    """ConfigError when the directory holds a run already, or with `resume` does not exist; makes nothing.

    A start that failed before anything came of it holds no run: it may be made again under the same name, and what it
    wrote (configuration, plan, copies of reward files) is replaced. A config.yaml that no start wrote is the user's.
    """
    others = (directory / "config.yaml").exists() and not (directory / LOCK).exists()
    if not resume and (others or has_results(directory)):
        raise ConfigError(
            f"train.name: the run directory '{directory}' exists; choose another name, or continue that run with "
            "--resume (in Python: resume=True)"
        )
    if resume and not directory.is_dir():
        found = tuple(path.name for path in sorted(directory.parent.glob("*")) if (path / "config.yaml").exists())
        remedy = f"{nearest(directory.name, found)}; or begin" if found else "begin"
        raise ConfigError(f"--resume: found no run '{directory}'; {remedy} it without --resume")
    for path in (directory / name for name in (*OF_STEPS, *OF_PARTS)):
        _check_no_link(path)
    for path in (
        *(directory / name for name in WRITTEN),
        *(path for of in OF_STEPS for path in directory.glob(f"{of}/*")),
    ):
        _check_own(path)
    for path in (directory / name for name in READ_WHOLE):
        if path.exists() and path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"train.name: '{path}' has {path.stat().st_size >> 30} GiB, which no run writes; remove it or choose "
                "another name"
            )


def _check_own(path: Path) -> None:
    """ConfigError where a run that writes this file would write elsewhere, or wait."""
    _check_no_link(path)
    if path.exists() and not path.is_file():  # opening a pipe waits for its other end
        raise ConfigError(f"train.name: '{path}' is not a file; remove it or choose another name")


def _check_no_link(path: Path) -> None:
    """ConfigError for a symbolic link: a resume cuts back what is behind it, and that may be another run's."""
    if path.is_symlink():
        raise ConfigError(
            f"train.name: '{path}' is a symbolic link, and a run writes into its directory only; "
            "remove it or choose another name"
        )


def is_unused(directory: Path) -> bool:
    """True if the path does not exist or is an empty directory."""
    return not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))


@contextmanager
def removed_without_results(directory: Path, made: bool) -> Iterator[None]:
    """Removes the directory of a run that nothing came of; after an error only if its log says no more than that does.

    `made`: this start has made all that is in it; else it stays. It stays, too, where a worker failed or a bug showed:
    that may have been hours later, with the terminal gone.
    """
    try:
        yield
    finally:
        error = sys.exception()
        says_more = isinstance(error, RlcoreError) and _log_has_causes(directory)
        is_reported = error is None or (isinstance(error, RlcoreError | Stopped) and not isinstance(error, WorkerError))
        if made and is_reported and not has_results(directory) and not says_more:
            shutil.rmtree(directory, ignore_errors=True)


def _log_has_causes(directory: Path) -> bool:
    with suppress(OSError):
        lines = (directory / LOG).read_text("utf-8", "replace").splitlines()
        others = [line for line in lines if ENDED not in line]
        return any(level in line for line in others for level in (" WARNING ", " ERROR ", " CRITICAL "))
    return False


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the run directory: a second process on it gets a ConfigError, and so does one on a filesystem without locks.
    The kernel releases it when the holder dies."""
    with writing_records(directory / LOCK):
        file = (directory / LOCK).open("w")
    with file as lock:
        for left in range(LOCK_TRIES - 1, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as cause:
                if not left:
                    raise in_use(directory) from cause
            except OSError as cause:
                raise ConfigError(
                    f"train.dir: the run directory '{directory}' cannot be locked ({describe(cause)}); needs a "
                    "filesystem with flock; choose another"
                ) from cause
            time.sleep(LOCK_PAUSE_S)
        yield


def in_use(directory: Path) -> ConfigError:
    """The error for a directory that another process holds."""
    return ConfigError(f"train.name: another process is training in '{directory}'; stop it or choose another name")


class LogFile(logging.FileHandler):
    """Discards messages on a full disk: they neither end the run nor cause a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.handleError`."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        """See `logging.Handler.close`; what is still unwritten is discarded."""
        with suppress(OSError):
            super().close()


class _Warnings(logging.Handler):
    """Passes on warnings, each as one line. Errors end a run, which shows them itself."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def handle(self, record: logging.LogRecord) -> bool:
        """See `logging.Handler.handle`, which holds the handler's lock meanwhile.

        Here that would be held while the terminal's is awaited, and a thread with that one logs when the terminal goes.
        """
        passes = bool(self.filter(record))
        if passes:
            self.emit(record)
        return passes

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if record.levelno == logging.WARNING and record.name != foreign_output.__name__:  # that output may be gone
            first, *more = record.getMessage().splitlines() or [""]
            self._warn(f"{first} {_exception_line(more)} ({LOG} has the traceback)" if more else first)


def _exception_line(lines: Sequence[str]) -> str:
    """The line of a traceback with the exception's class; those of a longer message, and notes, come after it.

    Frames are indented; the lines of an exception in a group have a margin of spaces and a bar.
    """
    starts = [index for index, line in enumerate(lines) if _TRACEBACK.match(line)]
    below = (re.sub(r"^ *\| ", "", line) for line in lines[starts[-1] + 1 :]) if starts else iter(())
    return next((line for line in below if line.strip() and not line.startswith(" ")), lines[-1])


@contextmanager
def logging_to(
    directory: Path, plugins: Iterable[Provider] = (), warn: Callable[[str], None] = lambda text: None
) -> Iterator[None]:
    """Append the messages of rlcore's and the plugins' loggers to log.txt, as they may be shown, and the error that
    ends the block.

    The terminal may be gone by then, and its error with it. `warn` gets rlcore's warnings, and standard error those of
    plugins, unless the application that runs rlcore handles them. CheckpointError when log.txt cannot be opened.
    """
    with writing_records(directory / LOG):
        handler = LogFile(directory / LOG)
    handler.setFormatter(DisplayFormatter(LOG_FORMAT))
    named = (name for plugin in plugins for name in (plugin.plugin, plugin.distribution.replace("-", "_")))
    is_alone = not logging.getLogger().handlers
    shown = (logging.lastResort,) if is_alone and logging.lastResort is not None else ()
    warnings = (_Warnings(warn),) if is_alone else ()
    with ExitStack() as stack:
        stack.callback(handler.close)
        for name in dict.fromkeys(("rlcore", *filter(str.isidentifier, named))):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.INFO)
            for output in (handler, *(warnings if name == "rlcore" else shown)):
                stack.callback(logger.removeHandler, output)
                logger.addHandler(output)
        stack.callback(foreign_output.wait_until_logged)
        stack.push(_end_in_words)
        yield


def _end_in_words(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """Log the error that ends a run; a signal that stopped it was logged where it came."""
    if isinstance(error, RlcoreError):
        logging.getLogger("rlcore").error(f"{ENDED}: %s", " ".join(str(error).split()))
        if frames := foreign_trace(error):
            logging.getLogger("rlcore").info("the traceback of this error:\n%s", frames)
    elif isinstance(error, asyncio.CancelledError):
        logging.getLogger("rlcore").error("the run was cancelled by code in this process")
    elif error is not None and not isinstance(error, Stopped):
        logging.getLogger("rlcore").critical("the run ended by an error that nothing expects", exc_info=error)


def write_plan(directory: Path, plan: RunPlan) -> None:
    """Save config.yaml and plan.json."""
    for name, content in plan_files(plan).items():
        with writing_records(directory / name):
            write_atomically(directory / name, content)


def plan_files(plan: RunPlan) -> dict[str, bytes]:
    """The contents of config.yaml and plan.json, for a run and its checkpoints."""
    text = json.dumps(plan_to_json(plan), indent=1) + "\n"
    return {"config.yaml": plan.loaded.yaml.encode(), "plan.json": text.encode()}


def write_rewards(directory: Path, plan: RunPlan) -> None:
    """Record the code of rewards: bare files are copied, and rewards.json has every hash."""
    provenance = json.dumps(reward_provenance(plan.rewards), indent=1) + "\n"
    with writing_records(directory / "rewards"):
        copy_reward_files(plan.rewards, directory / "rewards")
        (directory / "rewards.json").write_text(provenance)


def _reward_changes(directory: Path, plan: RunPlan) -> list[str]:
    """Reward functions whose code is not the one in rewards.json."""
    try:
        before = json.loads((directory / "rewards.json").read_bytes())
        now = reward_provenance(plan.rewards)
        common = [name for name in now if isinstance(before.get(name), dict)]
    except (OSError, ValueError, AttributeError, RecursionError):  # it is for people, so a resume does not depend on it
        return []
    return [
        f"the code of reward.functions.{name}, {now[name]['path'] or now[name]['target']}"
        for name in common
        if before[name].get("sha256") != now[name]["sha256"]
    ]


def plan_changes(directory: Path, plan: RunPlan) -> list[str]:
    """Differences from the plan saved in `directory`, a run's or a checkpoint's, one line per value, and the rewards
    whose code is another one than in the run's records."""
    earlier = directory / "plan.json"
    if not earlier.exists():
        return []
    try:
        before = json.loads(earlier.read_bytes())
    except (ValueError, RecursionError) as cause:  # it is for people, so a resume does not depend on it
        return [f"'{earlier}' cannot be read ({describe(cause)}), so what changed is not known"]
    now = json.loads(json.dumps(plan_to_json(plan)))
    places = [*(path.absolute().parent for path in plan.loaded.files), Path.cwd()]
    found = (change for change in differences(before, now, places=places) if not EXPLAINS.match(change))
    return [*found, *_reward_changes(directory, plan)]


def differences(before: object, now: object, path: str = "", places: Sequence[Path] = ()) -> Iterator[str]:
    """Each leaf that differs between two JSON values, as 'path: before -> now'.

    Two texts that name one file do not differ; relative paths count from the first of `places` that has the file.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key), places)
    elif before != now and not _same_file(before, now, places):
        yield f"{path}: {json.dumps(before)} -> {json.dumps(now)}"


def _same_file(before: object, now: object, places: Sequence[Path]) -> bool:
    """True for paths of one file or directory, and for the same name in one file, as in file.py:name."""
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    found = []
    for text in (before, now):
        where, colon, name = text.partition(":")
        here = next((os.path.join(place, where) for place in places if os.path.exists(os.path.join(place, where))), "")
        found.append((os.path.realpath(here), colon, name) if here and where else None)
    return found[0] is not None and found[0] == found[1]
