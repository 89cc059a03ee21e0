"""Runs of rlcore: docs/run-directory.md of rlcore describes the files."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import made_of, number_or_none
from rlcore_view.model import Run, Sample, Tokens, ViewError
from rlcore_view.readers import trace
from rlcore_view.token_files import RowId, Vocabulary, rows_of, vocabulary

_ALERT = re.compile(r"\S+ \S+ (WARNING|ERROR|CRITICAL) (.*)")
_ALERTS, _LOG_BYTES = 20, 1_000_000
_STEP = re.compile(r"step_(\d+)\.jsonl")


def recognises(path: Path) -> bool:
    """A directory with metrics.jsonl or trajectories/."""
    return (path / "trajectories").is_dir() or ((path / "metrics.jsonl").is_file() and (path / "plan.json").is_file())


def read(path: Path) -> Run:
    """Every sample with its tokens where they were recorded, the metrics, configuration and plan."""
    notes = list[str]()
    known = vocabulary(path / "tokens")
    samples = list[Sample]()
    for file in sorted((path / "trajectories").glob("step_*.jsonl")):
        if named := _STEP.fullmatch(file.name):
            samples += _step(path, file, int(named[1]), known, notes)
    metrics = path / "metrics.jsonl"
    return Run(
        name=path.resolve().name,
        format="rlcore",
        samples=samples,
        metrics=list(made_of(metrics, _numbers)) if metrics.exists() else [],
        config=_text(path / "config.yaml"),
        plan=_object(path / "plan.json", notes),
        events=trace.events_of(path, notes),
        alerts=_alerts(path / "log.txt"),
        notes=notes,
    )


def _step(run: Path, file: Path, step: int, known: Vocabulary, notes: list[str]) -> list[Sample]:
    tokens: dict[str, Mapping[RowId, Tokens]] = {}
    for lane in ("train", "eval"):
        path = run / "tokens" / f"{file.stem}.{lane}.safetensors"
        if path.exists():
            try:
                tokens[lane] = rows_of(path, known)
            except ViewError as error:
                notes.append(str(error))
    return list(made_of(file, lambda record: _sample(record, step, tokens)))


def _sample(record: Mapping[str, Any], step: int, tokens: Mapping[str, Mapping[RowId, Tokens]]) -> Sample:
    row, lane = record["id"], str(record.get("lane", "train"))
    key = (str(row["prompt"]), int(row["epoch"]), int(row["sample"]), int(row["segment"]))
    finish = record.get("finish")
    return Sample(
        step=step,
        prompt_id=key[0],
        epoch=key[1],
        sample=key[2],
        segment=key[3],
        prompt=record.get("prompt") or (),
        completion=record.get("completion") or "",
        score=number_or_none(record.get("score")) if record.get("status", "ok") == "ok" else None,
        lane=lane,
        source=str(record.get("source", "")),
        answer=record.get("answer"),
        components={name: value for name, value in (record.get("components") or {}).items() if value is not None},
        advantage=number_or_none(record.get("advantage")),
        num_sampled=record.get("num_sampled"),
        truncated=None if finish is None else finish == "length",
        status=str(record.get("status", "ok")),
        versions=record.get("versions") or (),
        info={"agent": record.get("agent") or {}, "reward": record.get("info") or {}},
        tokens=tokens.get(lane, {}).get(key),
    )


def _numbers(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number_or_none(value) for name, value in record.items()}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _alerts(path: Path) -> list[str]:
    """The last warnings and errors of the log, equal ones once."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    said = {named[2]: line for line in lines if (named := _ALERT.match(line))}
    return list(said.values())[-_ALERTS:]


def _object(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        notes.append(f"'{path.name}' is not whole, so the plan is not shown")
        return {}
    return found if isinstance(found, dict) else {}
