"""Reads the trace of a run, `trace*.json`: events as Chrome and Perfetto show them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import number_or_none
from rlcore_view.model import Event

MOST_EVENTS = 200_000
_MICROSECONDS = 1e6


def events_of(run: Path, notes: list[str]) -> list[Event]:
    """The events that have a length, of every trace of the run; a damaged file is a note."""
    found = list[Event]()
    for path in sorted(run.glob("trace*.json*")):
        try:
            records = list(_records(path.read_text("utf-8", "replace")))
        except (OSError, ValueError, RecursionError) as error:
            notes.append(f"'{path.name}' cannot be read, so its part of the timeline is missing: {str(error)[:120]}")
            continue
        rows = _rows(records)
        found += [event for record in records if (event := _event(record, rows)) is not None]
    if len(found) > MOST_EVENTS:
        found.sort(key=lambda event: event.length_s, reverse=True)
        notes.append(f"the timeline shows the {MOST_EVENTS} longest of {len(found)} events")
    return sorted(found[:MOST_EVENTS], key=lambda event: event.start_s)


def _records(text: str) -> Iterator[Mapping[str, Any]]:
    """The objects of an array, of `traceEvents`, or of an array that a run has not closed yet."""
    try:
        whole = json.loads(text)
        listed: Sequence[Any] = whole.get("traceEvents", [whole]) if isinstance(whole, dict) else whole
    except ValueError:
        listed = [_object(line) for line in text.lstrip().removeprefix("[").splitlines()]
    yield from (record for record in listed if isinstance(record, dict))


def _object(line: str) -> Any:
    try:
        return json.loads(line.strip().rstrip(",").strip() or "null")
    except ValueError:
        return None  # the torn last line, or a bracket


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
    given = record.get("args")
    args = given if isinstance(given, dict) else {}
    step, version, sample = number_or_none(args.get("step")), number_or_none(args.get("version")), args.get("sample")
    thread = rows.get((record.get("pid"), record.get("tid")), f"{record.get('pid')}/{record.get('tid')}")
    return Event(
        name=str(record.get("name", "")),
        kind=str(record.get("cat", "")),
        start_s=start / _MICROSECONDS,
        length_s=length / _MICROSECONDS,
        row=str(sample) if sample is not None else thread,
        step=None if step is None else int(step),
        sample=_identity(sample),
        version=None if version is None else int(version),
    )


def _identity(sample: Any) -> tuple[str, int, int, int] | None:
    """Prompt, epoch, sample and segment, of a list or of a text with slashes; None for another kind of name."""
    parts = list(sample) if isinstance(sample, list) else str(sample).rsplit("/", 3)
    if len(parts) != 4 or not all(str(part).isdigit() for part in parts[1:]):
        return None
    return str(parts[0]), int(parts[1]), int(parts[2]), int(parts[3])
