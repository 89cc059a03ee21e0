"""Reads verl's `trainer.rollout_data_dir`: a file `<step>.jsonl` per step, one line per sample.

A line has `input`, `output`, `score` and `step`, and one field per further value that the reward returned.
Samples with the same input are a group.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import first_record, made_of, score_or_none
from rlcore_view.model import Run, Sample

_KNOWN = {"input", "output", "score", "step", "gts"}


def recognises(path: Path) -> bool:
    """True for a directory of `<step>.jsonl` with input, output and score, or one of the files."""
    files = _files(path)
    first = first_record(files[0]) if files else None
    return first is not None and {"input", "output", "score"} <= first.keys()


def read(path: Path) -> Run:
    """Every sample, by step."""
    samples = list[Sample]()
    for file in _files(path):
        seen: dict[str, int] = {}
        samples += made_of(file, partial(_sample, file=file, seen=seen))
    return Run(name=path.resolve().name, format="verl rollout_data_dir", samples=samples)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return sorted((file for file in path.glob("*.jsonl") if file.stem.isdigit()), key=lambda file: int(file.stem))


def _sample(record: Mapping[str, Any], file: Path, seen: dict[str, int]) -> Sample:
    prompt = str(record["input"])
    sample = seen[prompt] = seen.get(prompt, -1) + 1
    more = {name: value for name, value in record.items() if name not in _KNOWN}
    numbers = {name: number for name, value in more.items() if (number := score_or_none(value)) is not None}
    step = record.get("step", file.stem if file.stem.isdigit() else 0)
    return Sample(
        step=int(step),
        prompt_id=prompt,
        sample=sample,
        prompt=({"role": "user", "content": prompt},),
        completion=str(record["output"]),
        score=score_or_none(record["score"]),
        answer=record.get("gts"),
        components=numbers,
        info={name: value for name, value in more.items() if name not in numbers},
    )
