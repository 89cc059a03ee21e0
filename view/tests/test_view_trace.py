"""The trace of a run: events by sample and worker, torn ends, and a schema from the future."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_rlcore_run
from rlcore_view import read
from rlcore_view.readers import trace

NAMES: list[dict[str, Any]] = [
    {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "workers", "schema": 1}},
    {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "actor"}},
]
SAMPLE = {"step": 1, "prompt": "sums/0", "epoch": 0, "sample": 1}


def event(name: str, kind: str, start: int, length: int, **args: Any) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "ts": start, "dur": length, "pid": 1, "tid": 1, "args": args}


EVENTS = [
    event("update", "call", 3_000_000, 500_000, step=1),
    event("sampled", "sample", 1_000_000, 2_000_000, **SAMPLE),
    event("judge", "reward", 2_000_000, 250_000, **SAMPLE),
    event("both", "reward", 2_500_000, 250_000, **SAMPLE, samples=2),
    {"name": "0 spans left out", "ph": "i", "ts": 1, "pid": 1, "tid": 1, "args": {}},
]


def lines(*events: dict[str, Any]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, events))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_rlcore_run(tmp_path / "sums", steps=1)


@pytest.mark.parametrize("end", ["\n]\n", ",\n", ',\n{"name": "torn", "ph"'])
def test_events_stand_in_the_row_of_their_sample_or_worker_whatever_the_end(run: Path, end: str) -> None:
    (run / "trace.json").write_text(lines(*NAMES, *EVENTS) + end)
    found = read(run)
    assert [(e.name, e.kind, e.row, e.start_s, e.length_s, e.sample) for e in found.events] == [
        ("sampled", "sampled", "sums/0 sample 1", 1.0, 2.0, ("sums/0", 0, 1, 0)),
        ("judge", "reward", "sums/0 sample 1", 2.0, 0.25, ("sums/0", 0, 1, 0)),
        ("both", "reward", "workers actor", 2.5, 0.25, None),
        ("update", "call", "workers actor", 3.0, 0.5, None),
    ]
    assert found.notes == []


@pytest.mark.parametrize("kind", ["sampled", "reward", "tool", "environment", "call"])
def test_work_for_one_sample_stands_in_its_row_and_calls_of_workers_in_theirs(run: Path, kind: str) -> None:
    (run / "trace.json").write_text(
        lines(*NAMES, event("step", "sample" if kind == "sampled" else kind, 1, 2, **SAMPLE))
    )
    [found] = read(run).events
    assert found.row == ("workers actor" if kind == "call" else "sums/0 sample 1")


def test_an_older_part_and_the_form_with_an_object_are_read(run: Path) -> None:
    (run / "trace.json").write_text(lines(*NAMES, EVENTS[0]) + "\n]\n")
    (run / "trace.older.json").write_text(json.dumps({"traceEvents": [*NAMES, EVENTS[1]]}))
    assert [event.name for event in read(run).events] == ["sampled", "update"]


def test_a_schema_from_the_future_is_a_note_and_the_rest_is_shown(run: Path) -> None:
    future = {**NAMES[0], "args": {"name": "workers", "schema": 2}}
    (run / "trace.json").write_text(lines(future, *EVENTS) + "\n]\n")
    found = read(run)
    assert found.events == []
    assert found.notes == ["'trace.json': its schema is 2; this rlcore-view reads 1; install a newer one"]
    assert len(found.samples) == 4


@pytest.mark.parametrize(
    "text", ["", "[", "3", "null", '"x"', "[1, null, []]", "\x00", '[{"ph": "X", "ts": "a", "dur": 1}]']
)
def test_what_is_not_a_trace_has_no_events(run: Path, text: str) -> None:
    (run / "trace.json").write_text(text)
    assert read(run).events == []


def test_of_very_many_events_the_longest_are_kept_and_it_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 2)
    (run / "trace.json").write_text(lines(*NAMES, *EVENTS) + "\n]\n")
    found = read(run)
    assert [event.name for event in found.events] == ["sampled", "update"]
    assert found.notes == ["the timeline shows the 2 longest of 4 events"]
