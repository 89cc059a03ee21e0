"""Reads TRL's `log_completions`: a `completions_00012.parquet` per step.

The columns are prompt, completion, one per reward function, and advantage.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore_view.json_lines import number_or_none
from rlcore_view.model import Run, Sample, ViewError

_FILE = re.compile(r"completions_(\d+)\.parquet")
_KNOWN = {"step", "prompt", "completion", "advantage", "images"}


def recognises(path: Path) -> bool:
    """True for a directory with completions_*.parquet, its parent, or one of the files."""
    return bool(_files(path))


def read(path: Path) -> Run:
    """Every sample. Its score is the unweighted sum of the reward columns: TRL does not record weights."""
    files = _files(path)
    samples = [sample for file in files for sample in _samples(file)]
    names = sorted({name for sample in samples for name in sample.components})
    notes = (
        [f"scores are the unweighted sums of {', '.join(names)}: TRL does not record weights"] if len(names) > 1 else []
    )
    return Run(name=path.resolve().name, format="TRL completions", samples=samples, notes=notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _FILE.fullmatch(path.name) else []
    found = list(path.glob("completions_*.parquet")) or list(path.glob("completions/completions_*.parquet"))
    return sorted(file for file in found if _FILE.fullmatch(file.name))


def _samples(file: Path) -> list[Sample]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ViewError(f"'{file}': reading parquet needs pyarrow; pip install pyarrow") from error
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise ViewError(f"'{file}': this is not a whole parquet file: {error}") from error
    seen: dict[str, int] = {}
    return [_sample(row, file, seen) for row in rows]


def _sample(row: Mapping[str, Any], file: Path, seen: dict[str, int]) -> Sample:
    prompt, completion = row["prompt"], row["completion"]
    name = str(prompt)
    sample = seen[name] = seen.get(name, -1) + 1
    more = {key: value for key, value in row.items() if key not in _KNOWN}
    components = {key: number for key, value in more.items() if (number := number_or_none(value)) is not None}
    match = _FILE.fullmatch(file.name)
    return Sample(
        step=int(row.get("step") or (match[1] if match else 0)),
        prompt_id=name,
        sample=sample,
        prompt=prompt if isinstance(prompt, list) else ({"role": "user", "content": str(prompt)},),
        completion=completion if isinstance(completion, list) else str(completion),
        score=sum(components.values()) if components else None,
        components=components,
        advantage=number_or_none(row.get("advantage")),
        info={key: value for key, value in more.items() if key not in components},
    )
