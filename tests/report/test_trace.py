"""trace.json: a file that Perfetto and Chrome open, whole at all times, of bounded size."""

import json
import random
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.activity import CALL, REWARD, SAMPLE, Activity, BegunWork, EndedWork, Span
from rlcore.errors import WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.report import trace
from rlcore.report.trace import OLDER_TRACE, TRACE, TraceLog
from rlcore.testing.runs import run_settings
from rlcore.train import Start, run_training
from rlcore.types import TrajectoryId

Event = dict[str, Any]


def spans_of(*times: tuple[float, float], kind: str = REWARD, who: str = "judge") -> EndedWork:
    """Work from when to when, of a sample each."""
    found = [
        Span(BegunWork(kind, who, "", TrajectoryId("p/0", 0, sample), 1, began), ended)
        for sample, (began, ended) in enumerate(times)
    ]
    return later(found)


def later(spans: Iterable[Span], num_left_out: int = 0) -> EndedWork:
    return EndedWork([], [lambda: spans], num_left_out)


def events_of(run_dir: Path) -> list[Event]:
    """The file, read as strictly as JSON is."""
    found: list[Event] = json.loads((run_dir / TRACE).read_text("utf-8"))
    return found


FIELDS = {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args", "s"}


def check_format(events: list[Event]) -> None:
    """The rules of the Trace Event Format: fields, phases, microseconds, numbers and names of processes and threads.

    Complete events of a thread are in the order of their beginnings and do not overlap by a microsecond, which is
    stricter than the format, where those of a thread must nest.
    """
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    busy: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys() <= FIELDS
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            if event["name"] == "thread_name":
                assert event["pid"] in processes
                assert (event["pid"], event["tid"]) not in named
                named.add((event["pid"], event["tid"]))
            else:
                assert event["pid"] not in processes
                processes.add(event["pid"])
            continue
        assert event["ph"] in ("X", "i")
        assert event["pid"] in processes
        assert (event["pid"], event["tid"]) in named
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            busy.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["s"] in ("g", "p", "t")
    for intervals in busy.values():
        overlapping = [pair for pair in pairwise(intervals) if pair[1][0] < pair[0][1]]
        assert overlapping == [], "complete events of a thread follow each other"


def test_a_span_has_its_times_in_microseconds_and_says_step_and_sample(tmp_path: Path) -> None:
    TraceLog(tmp_path, 1000.0).write(12, spans_of((1.0, 1.5)))
    events = events_of(tmp_path)
    check_format(events)
    assert events[-1] == {
        "name": "judge", "cat": "reward", "ph": "X", "ts": 1001_000_000, "dur": 500_000, "pid": 1, "tid": 1,
        "args": {"step": 12, "prompt": "p/0", "epoch": 0, "sample": 0},
    }  # fmt: skip


def test_overlapping_spans_are_on_separate_threads_and_consecutive_ones_share_one(tmp_path: Path) -> None:
    log = TraceLog(tmp_path, 0.0)
    log.write(1, spans_of((0.0, 2.0), (1.0, 3.0), (2.0, 4.0)))
    log.write(2, spans_of((3.5, 5.0)))
    events = events_of(tmp_path)
    check_format(events)
    assert [event["tid"] for event in events if event["ph"] == "X"] == [1, 2, 1, 2]


def test_work_that_follows_at_once_does_not_begin_before_the_end_whatever_rounding_does(tmp_path: Path) -> None:
    log, draw = TraceLog(tmp_path, 1.7e9), random.Random(0)
    for step in range(1, 6):
        times = [step + draw.random() for _ in range(400)]
        ends = sorted(times)
        log.write(step, spans_of(*pairwise(ends), *((begin, begin + draw.random()) for begin in times)))
    events = events_of(tmp_path)
    check_format(events)
    assert len([event for event in events if event["ph"] == "X"]) == 5 * 799


def test_both_parts_of_a_sample_stand_on_one_thread(tmp_path: Path) -> None:
    rows = [TrajectoryId("p/0", 0, sample) for sample in (0, 1)]
    times = [("sampled", rows[0], 0.0, 2.0), ("sampled", rows[1], 0.0, 1.0), ("scored", rows[1], 1.0, 5.0)]
    times.append(("scored", rows[0], 2.0, 3.0))
    spans = [Span(BegunWork(SAMPLE, who, "", row, 1, began), ended) for who, row, began, ended in times]
    TraceLog(tmp_path, 0.0).write(1, later(spans))
    events = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    check_format(events_of(tmp_path))
    threads = {sample: {event["tid"] for event in events if event["args"]["sample"] == sample} for sample in (0, 1)}
    assert [len(found) for found in threads.values()] == [1, 1]
    assert threads[0] != threads[1]


def test_the_file_is_json_after_every_step(tmp_path: Path) -> None:
    log = TraceLog(tmp_path, 0.0)
    for step in range(1, 5):
        log.write(step, spans_of((step, step + 1)))
        check_format(events_of(tmp_path))
    assert [event["args"]["step"] for event in events_of(tmp_path) if event["ph"] == "X"] == [1, 2, 3, 4]


@pytest.mark.parametrize("torn", [b"", b'\n{"name": "half', b"\x00\xff"], ids=["whole", "half a line", "noise"])
def test_a_resume_drops_later_steps_and_a_torn_end_and_keeps_the_same_threads(tmp_path: Path, torn: bytes) -> None:
    log = TraceLog(tmp_path, 0.0)
    for step in (1, 2, 3):
        log.write(step, spans_of((step, step + 1), (step, step + 1)))
    path = tmp_path / TRACE
    path.write_bytes(path.read_bytes().removesuffix(b"\n]\n" if torn else b"") + torn)
    resumed = TraceLog(tmp_path, 0.0)
    resumed.cut_back(2)
    resumed.write(3, spans_of((10, 11), (10, 11)))
    events = events_of(tmp_path)
    check_format(events)
    assert [event["args"]["step"] for event in events if event["ph"] == "X"] == [1, 1, 2, 2, 3, 3]
    assert len([event for event in events if event["ph"] == "M"]) == 3


@pytest.mark.parametrize(
    "line",
    [
        "[" * 200_000,
        '{"name": "process_name", "args": {}}',
        '{"name": "process_name", "args": {"name": ["x"]}, "pid": 1, "tid": 1}',
        '{"name": "thread_name", "args": {"name": "x"}, "pid": {}, "tid": 1}',
        '{"name": "thread_name", "args": {"name": "x"}, "pid": 1, "tid": null}',
        '{"name": "x", "args": {"step": "2"}}',
        '{"name": "x", "args": {"step": [2]}}',
        '{"name": "x", "args": {"step": 1e999}}',
    ],
)
def test_a_resume_drops_what_no_run_writes(tmp_path: Path, line: str) -> None:
    TraceLog(tmp_path, 0.0).write(1, spans_of((1, 2)))
    path = tmp_path / TRACE
    path.write_text(path.read_text().removesuffix("\n]\n") + f",\n{line}\n]\n")
    resumed = TraceLog(tmp_path, 0.0)
    resumed.cut_back(5)
    resumed.write(2, spans_of((3, 4)))
    events = events_of(tmp_path)
    check_format(events)
    assert [event["args"]["step"] for event in events if event["ph"] == "X"] == [1, 2]


def test_a_resume_from_the_start_leaves_an_empty_array_to_continue(tmp_path: Path) -> None:
    log = TraceLog(tmp_path, 0.0)
    log.write(1, spans_of((1, 2)))
    log.cut_back(-1)
    assert [event for event in events_of(tmp_path) if event["ph"] == "X"] == []
    log.write(1, spans_of((1, 2)))
    check_format(events_of(tmp_path))


@pytest.mark.parametrize("before", [1, 0], ids=["the newer file", "the older file"])
def test_a_resume_cuts_the_file_that_the_step_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 4000)
    log, older = TraceLog(tmp_path, 0.0), tmp_path / OLDER_TRACE
    step = 0
    while not older.exists() or len(events_of(tmp_path)) < 8:
        step += 1
        log.write(step, spans_of((step, step + 1)))
    first = next(event["args"]["step"] for event in events_of(tmp_path) if event["ph"] == "X")
    last, size = (first, older.stat().st_size) if before else (first - 2, 0)
    log.cut_back(last)
    newest = [event["args"]["step"] for event in events_of(tmp_path) if event["ph"] == "X"]
    held = [event["args"]["step"] for event in json.loads(older.read_bytes()) if event["ph"] == "X"]
    assert (newest, held[-1]) == (([first], first - 1) if before else ([], last))
    assert not size or older.stat().st_size == size


def test_the_size_is_bounded_and_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_BYTES", 4000)
    log = TraceLog(tmp_path, 0.0)
    for step in range(1, 200):
        log.write(step, spans_of((step, step + 1)))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 4000 + 1000
    check_format(events_of(tmp_path))
    assert events_of(tmp_path)[-1]["args"]["step"] == 199
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([TRACE, OLDER_TRACE])


def test_work_beyond_the_bound_of_a_step_is_counted_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.contracts.activity.MOST_SPANS", 10)
    activity = Activity("all")
    for _ in range(25):
        activity.end(activity.begin(REWARD, "judge"))
    ended = activity.take()
    assert (len(ended.spans()), ended.num_left_out) == (10, 15)
    TraceLog(tmp_path, 0.0).write(1, ended)
    check_format(events_of(tmp_path))
    assert events_of(tmp_path)[-1]["name"] == "15 spans left out"


@pytest.mark.parametrize(("record", "kinds"), [("all", {CALL, REWARD}), ("steps", {CALL}), ("none", set[str]())])
def test_what_is_kept_is_what_was_asked_for(record: Any, kinds: set[str]) -> None:
    activity = Activity(record)
    for kind in (CALL, REWARD):
        activity.end(activity.begin(kind, "x"))
    assert {span.work.kind for span in activity.take().spans()} == kinds


def trained(directory: Path, **more: Any) -> Path:
    """The directory of a run of two steps on the null model, with evaluation and checkpoint."""
    settings = run_settings(directory, 8, **{"eval.sources.held.path": str(directory / "held.jsonl"), **more})
    (directory / "held.jsonl").write_text('{"prompt": "other a", "answer": "a"}\n')
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return run_training(plan_run([{}], overrides, ("null",)), Start()).run_dir


def names(events: list[Event], where: Callable[[Event], bool]) -> set[str]:
    return {event["name"] for event in events if event["ph"] == "X" and where(event)}


@pytest.mark.slow
def test_a_run_says_who_worked_when(tmp_path: Path) -> None:
    events = events_of(trained(tmp_path, **{"algo.kl.placement": "loss", "reference.backend": "null"}))
    check_format(events)
    assert names(events, lambda event: event["cat"] == "step") == {"step 1", "step 2"}
    phases = names(events, lambda event: event["cat"] == "phase")
    assert phases >= {"sampling", "scoring", "updating", "handing over weights", "evaluating", "saving a checkpoint"}
    calls = names(events, lambda event: event["cat"] == "call")
    assert calls >= {"generate", "logprobs", "update", "publish", "snapshot", "write_snapshot"}
    assert names(events, lambda event: event["cat"] == "reward") == {"letters"}
    samples = [event for event in events if event.get("cat") == "sample"]
    of_step = {
        (event["name"], event["args"]["prompt"], event["args"]["sample"])
        for event in samples
        if event["args"]["step"] == 2 and not event["args"]["prompt"].startswith("eval/")
    }
    assert len(of_step) == 2 * 2 * 2, "2 prompts, 2 samples of each, sampled and scored"
    assert any(event["args"]["prompt"].startswith("eval/") for event in samples)


@pytest.mark.slow
def test_a_start_under_the_name_of_one_that_failed_drops_what_that_one_wrote(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train.name": "run", "eval.at_start": False}
    with pytest.raises(WorkerError, match="update 1 fails"):
        trained(tmp_path, **settings, **{"plugins.null.fail_at_update": 1})
    older = tmp_path / "runs" / "run" / OLDER_TRACE
    older.write_bytes(older.with_name(TRACE).read_bytes())
    events = events_of(trained(tmp_path, **settings))
    check_format(events)
    steps = [event["name"] for event in events if event.get("cat") == "step"]
    assert steps == ["step 1", "step 2"]
    assert not [event for event in json.loads(older.read_bytes()) if event["ph"] == "X"]


@pytest.mark.slow
def test_no_trace_is_written_where_none_is_wanted(tmp_path: Path) -> None:
    assert not (trained(tmp_path, **{"train.record_trace": "none"}) / TRACE).exists()
