"""Reads the trace of a run, `trace*.json`: events in the format of Chrome and Perfetto."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore_view.file_memory import FileMemory
from rlcore_view.json_lines import number_or_none
from rlcore_view.model import Event, ViewError

SCHEMA = 1
MOST_EVENTS = 200_000
_OF_A_SAMPLE = frozenset({"sample", "reward", "tool", "environment", "generate"})
_MICROSECONDS = 1e6


def events_of(run: Path, notes: list[str], memory: FileMemory) -> list[Event]:
    """The events with a duration, from every trace of the run; a damaged file becomes a note."""
    found = list[Event]()
    for path in sorted(run.glob("trace*.json*")):
        try:
            records = _records(path, memory)
        except (OSError, ValueError, RecursionError, ViewError) as error:
            notes.append(f"'{path.name}' cannot be read, so its part of the timeline is missing: {str(error)[:120]}")
            continue
        if (schema := _schema(records)) != SCHEMA:
            notes.append(f"'{path.name}': its schema is {schema}; this rlcore-view reads {SCHEMA}; install a newer one")
            continue
        rows = _rows(records)
        found += [event for record in records if (event := _event(record, rows)) is not None]
    if len(found) > MOST_EVENTS:
        found.sort(key=lambda event: event.length_s, reverse=True)
        notes.append(f"the timeline shows the {MOST_EVENTS} longest of {len(found)} events")
    return sorted(found[:MOST_EVENTS], key=lambda event: event.start_s)


def _records(path: Path, memory: FileMemory) -> list[Mapping[str, Any]]:
    """The objects of the file. If it has one event per line, only new lines are read."""
    try:
        known, rest = memory.lines(path, lambda line, number: _event_line(line), ends=(b",\n", b"[\n"))
    except ValueError:  # another layout
        return memory.whole([path], lambda: list(_records_of(path.read_text("utf-8", "replace"))))
    return [*known, *_records_of(rest.decode("utf-8", "replace"))]


def _event_line(line: bytes) -> Mapping[str, Any] | None:
    """The object on a line that ends with a comma; None for the opening bracket."""
    if line == b"[\n":
        return None
    found = json.loads(line.decode("utf-8", "replace").rstrip().removesuffix(","))
    if not isinstance(found, dict):
        raise ValueError("not an event")
    return found


def _records_of(text: str) -> Iterator[Mapping[str, Any]]:
    """The objects of an array, of `traceEvents`, or of an array that a run has not closed yet."""
    try:
        whole = json.loads(text)
        listed: Any = whole.get("traceEvents", [whole]) if isinstance(whole, dict) else whole
    except ValueError:
        listed = [_object(line) for line in text.lstrip().removeprefix("[").splitlines()]
    yield from (record for record in listed if isinstance(record, dict)) if isinstance(listed, list) else ()


def _object(line: str) -> Any:
    try:
        return json.loads(line.strip().rstrip(",").strip() or "null")
    except ValueError:
        return None  # the torn last line, or a bracket


def _schema(records: Sequence[Mapping[str, Any]]) -> Any:
    """The schema in the first process's name; the known schema if there is none."""
    stated = [(record.get("args") or {}).get("schema") for record in records if record.get("name") == "process_name"]
    return next((schema for schema in stated if schema is not None), SCHEMA)


def _rows(records: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], str]:
    """Names of threads, by process and thread."""
    named = [record for record in records if record.get("ph") == "M"]
    processes = {r.get("pid"): _name(r) for r in named if r.get("name") == "process_name"}
    return {
        (r.get("pid"), r.get("tid")): " ".join(filter(None, [processes.get(r.get("pid")), _name(r)]))
        for r in named
        if r.get("name") == "thread_name"
    }


def _name(record: Mapping[str, Any]) -> str:
    return str((record.get("args") or {}).get("name", ""))


def _event(record: Mapping[str, Any], rows: Mapping[tuple[Any, Any], str]) -> Event | None:
    start, length = number_or_none(record.get("ts")), number_or_none(record.get("dur"))
    if record.get("ph") != "X" or start is None or length is None:
        return None
    raw_args, name, kind = record.get("args"), str(record.get("name", "")), str(record.get("cat", ""))
    args: Mapping[str, Any] = raw_args if isinstance(raw_args, dict) else {}
    step, version, sample = number_or_none(args.get("step")), number_or_none(args.get("version")), _identity(args)
    alone = sample is not None and kind in _OF_A_SAMPLE and number_or_none(args.get("samples")) in (None, 1)
    thread = rows.get((record.get("pid"), record.get("tid")), f"{record.get('pid')}/{record.get('tid')}")
    return Event(
        name=name,
        kind=name if kind == "sample" else kind,
        start_s=start / _MICROSECONDS,
        length_s=length / _MICROSECONDS,
        row=f"{sample[0]} sample {sample[2]}" if alone and sample else thread,
        step=None if step is None else int(step),
        sample=sample if alone else None,
        version=None if version is None else int(version),
    )


def _identity(args: Mapping[str, Any]) -> tuple[str, int, int, int] | None:
    """Prompt, epoch, sample and segment; None if the event does not name a sample."""
    numbers = [number_or_none(args.get(name, 0)) for name in ("epoch", "sample", "segment")]
    if "prompt" not in args or "sample" not in args or None in numbers:
        return None
    epoch, sample, segment = (int(number or 0) for number in numbers)
    return str(args["prompt"]), epoch, sample, segment
