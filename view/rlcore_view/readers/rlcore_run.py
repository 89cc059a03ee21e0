"""Reads runs of rlcore; its docs/run-directory.md describes the files."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore_view.file_memory import FileMemory, whole_file
from rlcore_view.json_lines import made_again, made_of, number_or_none
from rlcore_view.model import Run, Sample, Tokens, ViewError
from rlcore_view.readers import trace
from rlcore_view.token_files import VOCABULARY, RowId, Vocabulary, rows_of, vocabulary

_ALERT = re.compile(r"\S+ \S+ (WARNING|ERROR|CRITICAL) (.*)")
_ALERTS, _LOG_BYTES = 20, 1_000_000
LANES = ("train", "eval")
_STEP = re.compile(r"step_(\d+)\.jsonl")


def recognises(path: Path) -> bool:
    """True for a directory with trajectories/, or with plan.json and the files written before the first step."""
    begun = any((path / name).is_file() for name in ("metrics.jsonl", "status.json"))
    return (path / "trajectories").is_dir() or (begun and (path / "plan.json").is_file())


def read(path: Path, memory: FileMemory | None = None) -> Run:
    """Every sample (with its tokens, if recorded), the metrics, configuration and plan.

    With the memory of an earlier call, only what is new is read.
    """
    memory = memory or FileMemory()
    notes = list[str]()
    known = vocabulary(path / "tokens", memory)
    samples = list[Sample]()
    for file in sorted((path / "trajectories").glob("step_*.jsonl")):
        if named := _STEP.fullmatch(file.name):
            found, step_notes = _remembered(file, int(named[1]), path / "tokens", known, memory)
            samples += found
            notes += step_notes
    metrics, plan, config = path / "metrics.jsonl", path / "plan.json", path / "config.yaml"
    plan_object, plan_notes = memory.whole([plan], lambda: _object(plan))
    return Run(
        name=path.resolve().name,
        format="rlcore",
        samples=samples,
        metrics=[*made_again(metrics, _numbers, memory)] if metrics.exists() else [],
        config=memory.whole([config], lambda: _text(config)),
        plan=plan_object,
        events=trace.events_of(path, notes, memory),
        alerts=_alerts(path / "log.txt", memory),
        notes=[*notes, *plan_notes],
    )


def _remembered(
    file: Path, step: int, directory: Path, known: Vocabulary, memory: FileMemory
) -> tuple[list[Sample], list[str]]:
    """`_step`, from the memory where nothing has changed."""
    tokens = [directory / f"{file.stem}.{lane}.safetensors" for lane in LANES]
    samples, notes, is_complete = memory.whole([file, *tokens], lambda: _step(file, tokens, step, known))
    if not is_complete:  # the run may have written them after `known` was read
        samples, notes, _ = memory.whole(
            [file, *tokens, directory / VOCABULARY], lambda: _step(file, tokens, step, vocabulary(directory, memory))
        )
    return samples, notes


def _step(file: Path, paths: Sequence[Path], step: int, known: Vocabulary) -> tuple[list[Sample], list[str], bool]:
    """(the samples of a step, a note for each file of tokens that cannot be read, True if all tokens are known)."""
    tokens: dict[str, Mapping[RowId, Tokens]] = {}
    notes, are_known = list[str](), True
    for lane, path in zip(LANES, paths, strict=True):
        if path.exists():
            try:
                tokens[lane], is_complete = rows_of(path, known)
                are_known = are_known and is_complete
            except ViewError as error:
                notes.append(str(error))
    return list(made_of(file, lambda record: _sample(record, step, tokens))), notes, are_known


def _sample(record: Mapping[str, Any], step: int, tokens: Mapping[str, Mapping[RowId, Tokens]]) -> Sample:
    row, lane = record["id"], str(record.get("lane", "train"))
    key = (str(row["prompt"]), int(row["epoch"]), int(row["sample"]), int(row["segment"]))
    finish, status = record.get("finish"), str(record.get("status", "ok"))
    score, advantage = number_or_none(record.get("score")), number_or_none(record.get("advantage"))
    return Sample(
        step=step,
        prompt_id=key[0],
        epoch=key[1],
        sample=key[2],
        segment=key[3],
        prompt=record.get("opening") or record.get("prompt") or (),
        completion=record.get("completion") or "",
        score=score if status == "ok" else None,
        lane=lane,
        source=str(record.get("source", "")),
        answer=record.get("answer"),
        components={name: value for name, value in (record.get("components") or {}).items() if value is not None},
        advantage=advantage,
        num_sampled=record.get("num_sampled"),
        truncated=None if finish is None else finish == "length",
        status=status,
        versions=record.get("versions") or (),
        info={
            "agent": record.get("agent") or {},
            "reward": record.get("info") or {},
            **({"token_score": record["token_score"]} if "token_score" in record else {}),
            **({"trained with score": score} if status != "ok" and advantage is not None else {}),
        },
        tokens=tokens.get(lane, {}).get(key),
    )


def _numbers(record: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number_or_none(value) for name, value in record.items()}


def _text(path: Path) -> str:
    return whole_file(path).decode("utf-8", "replace") if path.exists() else ""


def _alerts(path: Path, memory: FileMemory) -> list[str]:
    """The last warnings and errors of the log, without duplicates."""
    if not path.exists():
        return []
    found, _ = memory.lines(path, lambda line, number: _alert(line), most_bytes=_LOG_BYTES)
    return list(dict(found).values())[-_ALERTS:]


def _alert(line: bytes) -> tuple[str, str] | None:
    """(message, line) of a warning or an error."""
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    named = _ALERT.match(text)
    return (named[2], text) if named else None


def _object(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The object in the file, and a note if it is incomplete."""
    if not path.exists():
        return {}, []
    try:
        found = json.loads(whole_file(path))
    except (ValueError, RecursionError):
        return {}, [f"'{path.name}' is not whole, so the plan is not shown"]
    return (found if isinstance(found, dict) else {}), []
