"""Writes a run's steps to disk: `metrics.jsonl`, and one file of trajectories per step.

A line counts if it ends in a line break: readers ignore, and writers drop, a line that a crash cut off. Numbers that
are not finite are written as null, because JSON does not have them. Everything that depends on the clock is named
`time/...`, so that the rest of two equal runs is equal.
"""

import json
import math
import re
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import orjson

from rlcore.errors import CheckpointError, describe
from rlcore.errors.redaction import is_redacted, redact
from rlcore.report.files import write_atomically
from rlcore.types import Lane, Metrics, ScoredTrajectory, plain

METRICS, TRAJECTORIES = "metrics.jsonl", "trajectories"
MAX_RECORD = 16 << 20
"""Most bytes of a line of metrics.jsonl; real lines have a few thousand."""

_AS_TEXT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


class MetricsLog:
    """Appends to `<run>/metrics.jsonl`; a step may have several records, such as one of an evaluation."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._repaired = False

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one record: 'step', the metrics, and the time of writing as 'time/unix_s'."""
        with writing_records(self._path):
            self._repair()
        numbers = {name: float(value) for name, value in metrics.items()}
        record = {"step": step, **numbers, "time/unix_s": round(time.time(), 3)}
        with writing_records(self._path), self._path.open("ab") as file:
            file.write(_line(record))

    def cut_back(self, step: int, evaluated: bool = True) -> None:
        """Drop the records of later steps, and unless it was `evaluated` the evaluation of this one: a resumed run
        writes them again."""
        if self._path.exists():
            with closing(_whole_lines(self._path, MAX_RECORD)) as lines:
                records = [(line, _parse(line, self._path)) for line in lines]
            kept = [
                line
                for line, record in records
                if record["step"] < step or (record["step"] == step and (evaluated or not _is_evaluation(record)))
            ]
            with writing_records(self._path):
                write_atomically(self._path, b"".join(kept))

    def _repair(self) -> None:
        """Remove an incomplete last line, once, because a record that is appended would become part of it."""
        if not self._repaired and self._path.exists():
            whole = sum(map(len, _whole_lines(self._path, MAX_RECORD)))
            with self._path.open("r+b") as file:
                file.truncate(whole)
        self._repaired = True


class TrajectoryLog:
    """Writes `<run>/trajectories/step_000012.jsonl`, one line per trajectory; a step's file is replaced as a whole."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / TRAJECTORIES

    def append(self, step: int, lines: bytes) -> None:
        """Add the result of `trajectory_lines` to the file of the step."""
        path = self._directory / f"step_{step:06d}.jsonl"
        with writing_records(path):
            self._directory.mkdir(exist_ok=True)
            before = _whole_lines(path) if path.exists() else ()
            write_atomically(path, b"".join((*before, lines)))

    def cut_back(self, step: int, evaluated: bool = True) -> None:
        """Remove the files of later steps, the latest first, and unless it was `evaluated` this one's evaluation."""
        for path in reversed(_step_files(self._directory)):
            if int(path.name[5:-6]) > step:
                with writing_records(path):
                    path.unlink()
            elif int(path.name[5:-6]) == step and not evaluated:
                with closing(_whole_lines(path)) as lines:
                    kept = [line for line in lines if json.loads(line)["lane"] != Lane.EVAL]
                with writing_records(path):
                    write_atomically(path, b"".join(kept))


@contextmanager
def writing_records(path: Path) -> Iterator[None]:
    """CheckpointError in one line if the disk is full or the directory is gone."""
    try:
        yield
    except OSError as cause:
        run_dir = next((parent for parent in path.parents if (parent / METRICS).exists()), path.parent)
        raise CheckpointError(
            f"'{path}': records cannot be written: {describe(cause)}; make room or bring the directory back, then "
            f"{way_on(run_dir)}"
        ) from cause


def way_on(run_dir: Path) -> str:
    """The words that say how to continue a run that ended; a run without a checkpoint starts over."""
    with suppress(OSError, CheckpointError):
        if last_step(run_dir) and not any((run_dir / "checkpoints").glob("step_*")):
            return "begin again with --resume --from-start"
    return "continue with --resume"


def trajectory_lines(rows: Iterable[tuple[ScoredTrajectory, float | None]], lane: Lane) -> bytes:
    """A line per row (trajectory with its reward; its advantage, or None if it has none)."""
    return b"".join(_line(_describe(scored, advantage, lane)) for scored, advantage in rows)


def read(run_dir: Path) -> list[Metrics]:
    """The records of the run's metrics, in order, with 'step', and NaN for null. CheckpointError on a bad line."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    with closing(_whole_lines(path, MAX_RECORD)) as lines:
        records = [_parse(line, path) for line in lines]
    return [{name: math.nan if value is None else value for name, value in record.items()} for record in records]


def has_results(run_dir: Path) -> bool:
    """True if the directory holds results that a new start would overwrite: metrics, trajectories, checkpoints."""
    records = run_dir / METRICS
    kept = [path for name in (TRAJECTORIES, "checkpoints") for path in (run_dir / name).glob("*")]
    return bool(kept) or (records.is_file() and records.stat().st_size > 0)


def last_step(run_dir: Path) -> int:
    """The last step whose metrics or trajectories were written; 0 if there is none."""
    steps = [int(path.name[5:-6]) for path in _step_files(run_dir / TRAJECTORIES)]
    return max([0, *steps, *(int(record["step"]) for record in read(run_dir))])


def read_trajectories(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The recorded trajectories of the step; empty if there are none."""
    path = run_dir / TRAJECTORIES / f"step_{step:06d}.jsonl"
    if not path.exists():
        return []
    with closing(_whole_lines(path)) as lines:
        return [json.loads(line) for line in lines]


def average(metrics: Iterable[Mapping[str, float]]) -> Metrics:
    """The mean of each metric over the mappings that have it, or the maximum if its name ends in '_max'; NaN gives
    NaN."""
    values: dict[str, list[float]] = {}
    for metric in metrics:
        for name, value in metric.items():
            values.setdefault(name, []).append(value)
    return {
        name: _largest(value) if name.endswith("_max") else _total(value) / len(value) for name, value in values.items()
    }


def _largest(values: list[float]) -> float:
    """The largest value, or NaN if there is one: `max` skips a NaN that follows another number."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _total(values: list[float]) -> float:
    """The sum; `math.fsum` refuses infinities of both signs."""
    total = sum(values)
    return math.fsum(values) if math.isfinite(total) else total


def _describe(scored: ScoredTrajectory, advantage: float | None, lane: Lane) -> dict[str, Any]:
    trajectory, reward, row = scored.trajectory, scored.reward, scored.trajectory.id
    return {
        "id": {"prompt": row.prompt, "epoch": row.epoch, "sample": row.sample, "segment": row.segment},
        "lane": lane,
        "source": trajectory.prompt.source,
        "prompt": trajectory.prompt.messages,
        **({} if trajectory.opening is None else {"opening": trajectory.opening}),
        "answer": trajectory.prompt.answer,
        "completion": trajectory.completion,
        "num_tokens": len(trajectory.token_ids),
        "num_sampled": trajectory.num_sampled,
        "finish": trajectory.finish,
        "versions": trajectory.versions,
        "turns": trajectory.turns,
        "agent": trajectory.info,
        "status": reward.status,
        "score": reward.score,
        **({} if reward.token_scores is None else {"token_score": scored.token_score}),
        "components": reward.components,
        "info": reward.info,
        "advantage": advantage,
    }


def _line(record: Mapping[str, Any]) -> bytes:
    """The record as a line of JSON, without secrets; values that JSON lacks become text."""
    try:
        line = orjson.dumps(record, as_json, _AS_TEXT | orjson.OPT_APPEND_NEWLINE)
        if is_redacted(line):
            return line
    except orjson.JSONEncodeError:  # a key that is not text, a lone surrogate, an integer of more than 64 bits
        pass
    # a lone surrogate in a text becomes its JSON escape
    text = json.dumps(as_json(record), ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8", "backslashreplace")


def as_json(value: Any) -> Any:
    """The value as JSON, without secrets; values that JSON lacks become text."""
    return plain(value, _leaf, lambda name: redact(str(name)))


def _leaf(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return redact(value)
    return as_json(value.value) if isinstance(value, Enum) else redact(str(value))


def _whole_lines(path: Path, most_bytes: int = -1) -> Generator[bytes]:
    """The lines that end in a line break. CheckpointError for a line of `most_bytes`, which is not read further."""
    if not path.is_file():
        raise CheckpointError(f"'{path}': it is not a file; remove it")
    with path.open("rb") as file:
        while (line := file.readline(most_bytes)).endswith(b"\n"):
            yield line
    if len(line) == most_bytes:
        raise CheckpointError(
            f"'{path}': a line has {most_bytes >> 20} MiB or more, beginning with {line[:20]!r}; needs records of "
            "metrics; fix or remove the file"
        )


def _parse(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record["step"], int) and all(map(_is_number, record.values())):
            return dict(record)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    raise CheckpointError(f"'{path}': {line[:60]!r} is not a record of metrics; fix or remove the line")


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    """True for the record of an evaluation; one of a step has no metrics of held-out prompts."""
    return any(name.startswith("eval/") for name in record)


def _is_number(value: object) -> bool:
    """True for a number or null; OverflowError for an integer that no float holds."""
    return value is None or (isinstance(value, (int, float)) and isinstance(float(value), float))


def _step_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step_*.jsonl") if _STEP_FILE.fullmatch(path.name))
