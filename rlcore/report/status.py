"""`status.json` in the run directory: the run's current activity, for `rlcore where` and for programs.

A thread reads the activity each second, so the file also shows a controller that is blocked.
"""

import fcntl
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from rlcore.contracts.activity import CALL, Activity, BegunWork, summed
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors import ConfigError, describe, shown
from rlcore.errors.redaction import redact

STATUS, SCHEMA = "status.json", 1
LOCK = ".lock"
"""Every start creates this file before it writes anything else, and holds its lock during the run."""
LOOK_S = 1.0
"""Seconds between two reads of the activity; the file is written at most that often, and only after a change."""
MAX_BYTES = 1 << 20
"""Most bytes of a file that is read."""
MOST_WAITING = 50
"""Most rewards, tools, environments and agents that are listed."""
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"

T = TypeVar("T")
_TYPES: Mapping[str, tuple[type[Any], ...]] = {
    str(kind): kinds for kind, kinds in ((int, (int,)), (float, (int, float)), (str, (str,)))
}
"""The types that a field's value may have in JSON, by the field's annotation."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WaitingSamples:
    """Samples that wait for one reward, tool, environment or agent."""

    kind: str
    """reward, tool, environment or agent."""
    who: str
    samples: int
    oldest: float
    """The time since which the oldest waits."""


@dataclass(frozen=True)
class RoleStatus:
    """The replicas of a role."""

    role: str
    replicas: int
    busy: int
    """Replicas with a call in flight."""
    method: str = ""
    """The method of the oldest call; empty without one."""
    since: float = 0.0
    """The time when that call began."""


@dataclass(frozen=True)
class Status:
    """The state of a run. Times are seconds since 1970."""

    state: str
    """running, finished, stopped by a signal, or failed; `running` is also what a killed run leaves."""
    pid: int
    host: str
    began: float
    step: int
    """The current step; 0 before the first."""
    steps: int
    """The last step of the run; 0 while it is unknown."""
    phase: str
    phase_began: float
    step_began: float
    step_s: float
    """Mean seconds of a step, over the last steps; 0 before the first."""
    samples: int
    """Samples of the current step or evaluation."""
    sampled: int
    scored: int
    updates: int
    """Updates of a step."""
    updated: int
    waiting: tuple[WaitingSamples, ...] = ()
    roles: tuple[RoleStatus, ...] = ()
    problem: str = ""
    """The reason why the run stopped or failed, in one line."""


def status_of(activity: Activity, began: float, state: str = RUNNING, problem: str = "") -> Status:
    """The status of this process's run; any thread may call it. `began`: time of its start, in seconds since 1970."""
    offset, works, counts = activity.unix_offset, activity.open_work(), activity.counts()
    return Status(
        state=state,
        pid=os.getpid(),
        host=socket.gethostname(),
        began=round(began, 1),
        step=activity.step,
        steps=activity.total_steps,
        phase=activity.phase,
        phase_began=round(activity.phase_began + offset, 1),
        step_began=round(activity.step_began + offset, 1),
        step_s=round(activity.step_s, 3),
        samples=counts.issued,
        sampled=counts.sampled,
        scored=counts.scored,
        updates=activity.num_updates,
        updated=activity.updated,
        waiting=tuple(_waiting(works, offset)),
        roles=tuple(_roles(works, activity.groups, offset)),
        problem=" ".join(problem.split()),
    )


def _waiting(works: list[BegunWork], offset: float) -> Iterator[WaitingSamples]:
    """The waiting samples by reward, tool, environment and agent; those of other processes come last."""
    for work in summed(works)[:MOST_WAITING]:
        yield WaitingSamples(work.kind, work.who, work.num, round(work.began + offset, 1))


def _roles(works: list[BegunWork], groups: Mapping[str, WorkerGroup[Any]], offset: float) -> Iterator[RoleStatus]:
    for role, group in list(groups.items()):
        names = {replica.name for replica in group.replicas}
        mine = [work for work in works if work.kind == CALL and work.who in names]
        if mine:
            oldest = min(mine, key=lambda work: work.began)
            busy = len({work.who for work in mine})
            yield RoleStatus(role, len(names), busy, oldest.what, round(oldest.began + offset, 1))
        else:
            yield RoleStatus(role, len(names), 0)


def write_status(run_dir: Path, status: Status) -> None:
    """Replace the file; it is not forced to the disk, because it describes only the present."""
    temporary = run_dir / f".{STATUS}.tmp"
    temporary.unlink(missing_ok=True)  # a link would overwrite its target, a pipe would wait
    temporary.write_bytes(_record(status))
    temporary.replace(run_dir / STATUS)


def _overwrite_status(run_dir: Path, status: Status) -> None:
    """Write into the existing file, which needs no room on a full disk; a reader may see a part of it."""
    with open(os.open(run_dir / STATUS, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "wb", 0) as file:
        file.write(_record(status))
        file.truncate()


def _record(status: Status) -> bytes:
    record = {"schema": SCHEMA, **asdict(status), "written": round(time.time(), 1)}
    return (redact(json.dumps(record, ensure_ascii=False)) + "\n").encode("utf-8", "backslashreplace")


def is_held(run_dir: Path) -> bool:
    """True while a process trains in the directory."""
    path = run_dir / LOCK
    if not path.is_file():  # opening a pipe waits for its other end
        return False
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a filesystem without locks, on which `train.run_dir.locked` lets no run begin
            return False
    return False


class StatusWriter:
    """Writes a run's status at most once per second, and answers questions about it."""

    def __init__(self, run_dir: Path, activity: Activity, shown: Callable[[Status], None]) -> None:
        """The thread calls `shown` with the status each second."""
        self._run_dir, self._activity, self._shown = run_dir, activity, shown
        self._began = time.time()
        self._questions: queue.SimpleQueue[Callable[[Status], None] | None] = queue.SimpleQueue()
        self._written: Status | None = None
        self._is_broken = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Write the file during the run."""
        self._write(status_of(self._activity, self._began))
        thread = threading.Thread(target=self._look, name="status of the run", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._questions.put(None)
            thread.join()

    def ask(self, answer: Callable[[Status], None]) -> None:
        """Let the thread call `answer` with the status; a signal handler may ask at any time."""
        self._questions.put(answer)  # the only queue that a signal handler may put into

    def end(self, state: str, problem: str = "") -> None:
        """Write the end of the run."""
        status = status_of(self._activity, self._began, state, problem)
        self._write(status)
        if self._is_broken:  # a full disk may be what ended the run, which was not killed
            with suppress(OSError):
                _overwrite_status(self._run_dir, status)

    def _look(self) -> None:
        while True:
            answer: Callable[[Status], None] | None = _no_answer
            with suppress(queue.Empty):
                answer = self._questions.get(timeout=LOOK_S)
            if answer is None:
                return
            status = status_of(self._activity, self._began)
            self._write(status)
            self._shown(status)
            answer(status)

    def _write(self, status: Status) -> None:
        """Write a changed status; a full disk is reported once, and does not end the run."""
        if status == self._written:
            return
        try:
            write_status(self._run_dir, status)
            self._written, self._is_broken = status, False
        except OSError as cause:
            if not self._is_broken:
                logger.warning("'%s' cannot be written: %s", self._run_dir / STATUS, describe(cause))
            self._is_broken = True


def _no_answer(status: Status) -> None:
    """The answer if a second passes without a question: none."""


def read_status(run_dir: Path) -> tuple[Status, float] | None:
    """The file's content and the time of writing; None without a file, ConfigError for an invalid one."""
    path = run_dir / STATUS
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ValueError("it is not a file, or too large")
        found = json.loads(path.read_bytes())
        if (schema := found["schema"]) != SCHEMA:
            raise ConfigError(f"'{path}': its schema is {shown(schema)}; this rlcore reads {SCHEMA}; use a newer one")
        waiting = tuple(_fields_of(WaitingSamples, record) for record in found["waiting"])
        roles = tuple(_fields_of(RoleStatus, record) for record in found["roles"])
        status = _fields_of(Status, found | {"waiting": waiting, "roles": roles})
        if not math.isfinite(written := float(found["written"])):
            raise ValueError(f"written is {written}")
        return status, written
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as cause:
        raise ConfigError(f"'{path}': it is not a status of a run: {describe(cause)}; remove it") from cause


def _fields_of(cls: type[T], record: Mapping[str, Any]) -> T:
    """The dataclass with the record's fields that it has; new fields do not change the schema."""
    made = cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})  # type: ignore[arg-type]
    for field in fields(cls):  # type: ignore[arg-type]
        value, needed = getattr(made, field.name), _TYPES.get(str(field.type), (object,))
        if not isinstance(value, needed) or isinstance(value, bool):
            raise TypeError(f"{field.name} is {shown(value)}")
        if isinstance(value, (int, float)) and not math.isfinite(value):
            raise ValueError(f"{field.name} is {value}")
    return made
