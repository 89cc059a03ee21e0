"""Writes `trace.json`, a timeline of all work, for Perfetto (ui.perfetto.dev) and Chrome (about:tracing).

docs/run-directory.md describes it. The file is a JSON array at all times: a step replaces the closing bracket.
"""

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO

from rlcore.contracts.activity import CALL, PHASE, SAMPLE, STEP, EndedWork, Span
from rlcore.errors.redaction import redact
from rlcore.report.metrics import writing_records
from rlcore.types import TrajectoryId

TRACE, OLDER_TRACE = "trace.json", "trace.older.json"
SCHEMA = 1
MOST_BYTES = 64 << 20
"""A file of this size replaces the older file."""

LONGEST_LINE = 1 << 20
"""Most bytes of an event's line; a longer line is not an event."""

_BEGIN, _BETWEEN, _END = "[\n", ",\n", "\n]\n"
_CONTROLLER, _SAMPLES = "controller", "samples"

Event = dict[str, Any]
SpanReader = Callable[[int, Sequence[Span], float], None]
"""A function of a step's number, its spans, and the seconds to add to their times for seconds since 1970."""


class TraceLog:
    """Appends the spans of a step. Spans on one thread never overlap, because each span takes a free thread."""

    def __init__(self, run_dir: Path, unix_offset: float, also: SpanReader | None = None) -> None:
        """`unix_offset`: seconds to add to a span's times for seconds since 1970; `also` gets all spans, too."""
        self._path, self._offset, self._also = run_dir / TRACE, unix_offset, also
        self._forget()

    def write(self, step: int, ended: EndedWork) -> None:
        """Add the work that has ended by the end of `step`; write nothing if nothing is recorded."""
        spans = sorted(ended.spans(), key=lambda span: span.work.began)
        if not spans and not ended.num_left_out:
            return
        if self._also is not None:
            self._also(step, spans, self._offset)
        with writing_records(self._path):
            if self._path.exists() and self._path.stat().st_size > MOST_BYTES:
                self._path.replace(self._path.with_name(OLDER_TRACE))
                self._forget()
            found = list(self._events(step, spans, ended.num_left_out))
            self._append(redact(_lines(found)))

    def cut_back(self, step: int) -> None:
        """Drop events of later steps, which a resumed run writes again, and an incomplete end.

        Holds one event in memory at a time.
        """
        self._forget()
        older = self._path.with_name(OLDER_TRACE)
        if not (self._path.is_file() and self._cut(self._path, step, self._remember)) and older.is_file():
            self._cut(older, step, lambda event: None)

    def _cut(self, path: Path, step: int, remember: Callable[[Event], None]) -> bool:
        """Cut the file after its last event of at most this step; True if there is one."""
        end, is_begun = len(_BEGIN), False
        with writing_records(path), path.open("r+b") as file:
            for event, behind in _read(file):
                number = event["args"].get("step")
                if number is not None and number > step:
                    break
                remember(event)
                end, is_begun = behind, is_begun or number is not None
            file.seek(0)
            file.write(_BEGIN.encode())
            file.seek(end)
            file.write(_END.encode())
            file.truncate()
        return is_begun

    def _append(self, lines: str) -> None:
        end = (lines + _END).encode("utf-8", "replace")
        if not self._path.exists():
            self._path.write_bytes(_BEGIN.encode() + end)
            return
        with self._path.open("r+b") as file:
            begin = file.seek(-len(_END), 2)
            is_empty = begin <= len(_BEGIN)
            file.seek(len(_BEGIN) if is_empty else begin)
            file.write(end if is_empty else _BETWEEN.encode() + end)
            file.truncate()

    def _forget(self) -> None:
        """Reset the names: the file has none."""
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._lanes: dict[tuple[int, str], list[tuple[float, int]]] = {}
        """Heaps of (time when a thread becomes free, its number), by process and name of the thread."""

    def _remember(self, event: Event) -> None:
        """Keep a name that the file has."""
        if event["name"] == "process_name":
            self._processes[event["args"]["name"]] = event["pid"]
        elif event["name"] == "thread_name":
            self._threads[event["pid"], event["args"]["name"]] = event["tid"]

    def _events(self, step: int, spans: list[Span], num_left_out: int) -> Iterator[Event]:
        scored_until = {span.work.sample: span.ended for span in spans if span.work.kind == SAMPLE}
        lanes: dict[TrajectoryId | None, str] = {}
        for span in spans:
            work = span.work
            process, thread = _place(work.kind, work.who)
            pid = yield from self._process(process)
            if work.kind == SAMPLE:  # both parts of a sample are on one thread
                if work.sample not in lanes:
                    lanes[work.sample] = self._lane(pid, thread, work.began, scored_until[work.sample])
                lane = lanes[work.sample]
            else:
                lane = self._lane(pid, thread, work.began, span.ended)
            tid = yield from self._thread(pid, lane)
            began = round((work.began + self._offset) * 1e6)
            ended = round((span.ended + self._offset) * 1e6)  # so that the next span does not begin earlier
            yield {
                "name": work.what or work.who,
                "cat": work.kind,
                "ph": "X",
                "ts": began,
                "dur": max(0, ended - began),
                "pid": pid,
                "tid": tid,
                "args": {"step": step, **_sample(work.sample, work.num)},
            }
        if num_left_out:
            pid = yield from self._process(_CONTROLLER)
            tid = yield from self._thread(pid, PHASE)
            at = round((spans[-1].ended + self._offset) * 1e6) if spans else 0
            name, args = f"{num_left_out} spans left out", {"step": step}
            yield {"name": name, "cat": STEP, "ph": "i", "s": "g", "ts": at, "pid": pid, "tid": tid, "args": args}

    def _lane(self, pid: int, thread: str, began: float, ended: float) -> str:
        """The name of the thread that has been free for longest, or of a further one."""
        lanes = self._lanes.setdefault((pid, thread), [])
        number = heappop(lanes)[1] if lanes and lanes[0][0] <= began else len(lanes) + 1
        heappush(lanes, (ended, number))
        return thread if number == 1 else f"{thread} ({number})"

    def _process(self, name: str) -> Generator[Event, None, int]:
        """The number of a process; yields its name before its first event."""
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            args: Event = {"name": name}
            if name == _CONTROLLER:
                args["schema"] = SCHEMA
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": args}
        return self._processes[name]

    def _thread(self, pid: int, name: str) -> Generator[Event, None, int]:
        """The number of a thread; yields its name before its first event."""
        if (pid, name) not in self._threads:
            tid = self._threads[pid, name] = len(self._threads) + 1
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        return self._threads[pid, name]


def _lines(events: list[Event]) -> str:
    return _BETWEEN.join([json.dumps(event, separators=(",", ":")) for event in events])


def _place(kind: str, who: str) -> tuple[str, str]:
    """The process and thread that show a span."""
    if kind in (STEP, PHASE):
        return _CONTROLLER, kind
    if kind == SAMPLE:
        return _SAMPLES, SAMPLE
    return ("workers", who) if kind == CALL else (f"{kind} {who}", who)


def _sample(row: TrajectoryId | None, num: int) -> Event:
    if row is None:
        return {}
    found: Event = {"prompt": row.prompt, "epoch": row.epoch, "sample": row.sample}
    return found | {"samples": num} if num > 1 else found


def _read(file: BinaryIO) -> Iterator[tuple[Event, int]]:
    """The events on whole lines with the offsets after them, until a line that is not an event."""
    if file.readline(LONGEST_LINE) != _BEGIN.encode():
        return
    while line := file.readline(LONGEST_LINE):
        text = line.rstrip(b"\n").removesuffix(b",")
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not _is_event(event):
            return
        yield event, file.tell() - len(line) + len(text)


def _is_event(event: object) -> bool:
    """True for an event that a run may have written; checks only the parts that a resume reads."""
    if not isinstance(event, dict) or not isinstance(args := event.get("args"), dict):
        return False
    if event.get("name") in ("process_name", "thread_name"):
        return isinstance(args.get("name"), str) and type(event.get("pid")) is type(event.get("tid")) is int
    return "name" in event and type(args.get("step", 0)) is int
