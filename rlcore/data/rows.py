"""The rows of a source, as they are: local files, directories, hub datasets, generated tasks."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rlcore.config import SourceConfig
from rlcore.data.conversation import normalised
from rlcore.errors import ConfigError, boundary, nearest

JSON_LINES = frozenset({".jsonl", ".ndjson"})
MAX_DEPTH = 64
"""Levels of lists and objects in a row."""
TABLES = frozenset({".csv", ".parquet"})


class Row(NamedTuple):
    """One row of a source and the words by which an error names it."""

    where: str
    """'line 3' of a file of lines, else 'row 2'."""
    values: Mapping[str, Any]


def read_rows(source: SourceConfig, who: str) -> list[Row]:
    """The rows of the source, no more than the limit needs; ConfigError, beginning with `who`, when there are none."""
    if bool(source.path) == bool(source.task):
        found = f"path='{source.path}' and task='{source.task}'" if source.path else "neither path nor task"
        raise ConfigError(f"{who}: it has {found}, needed is one of them: a file or dataset, or a reasoning_gym task")
    if source.limit < 0:
        raise ConfigError(f"{who}.limit: it is {source.limit}, needed is a number of rows, or 0 for all")
    # what is left out by `keep` does not count towards the limit
    rows = list(islice(_rows(source, who), None if source.keep else source.limit or None))
    if not rows:
        raise ConfigError(f"{who}: '{source.path or source.task}' has no rows in split '{source.split}'")
    for row in rows:
        if _is_deep(row.values):
            raise ConfigError(
                f"{who}: '{source.path or source.task}' {row.where} is nested more than {MAX_DEPTH} levels deep, which "
                "would end by recursion what reads it; make it flatter, or keep such values as JSON in a text"
            )
    return rows


def _is_deep(values: Mapping[str, Any]) -> bool:
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, (Mapping, list, tuple))
            for inner in (value.values() if isinstance(value, Mapping) else value)
        ]
        if not level:
            return False
    return True


def _rows(source: SourceConfig, who: str) -> Iterator[Row]:
    if source.task:
        return _task_rows(source, who)
    path = Path(source.path).expanduser()
    if path.suffix.lower() in JSON_LINES | TABLES:
        if not path.is_file():
            raise ConfigError(f"{who}.path: there is no file '{source.path}' (looked in {path.absolute().parent})")
        _refuse_without_effect(source, path, who)
        return _line_rows(path, who) if path.suffix.lower() in JSON_LINES else _table_rows(source, path, who)
    if path.is_file():  # else its name would be looked up on the hub
        suffixes = ", ".join(sorted(JSON_LINES | TABLES))
        raise ConfigError(f"{who}.path: found the file '{source.path}'; needs one that ends in {suffixes}; convert it")
    return _dataset_rows(source, path, who)


def _refuse_without_effect(source: SourceConfig, path: Path, who: str) -> None:
    """A file is one split, and lines of JSON do not have options."""
    if source.split != "train":
        raise ConfigError(f"{who}.split: it is '{source.split}', a file has no splits; leave it out, or see `limit`")
    if source.subset:
        raise ConfigError(f"{who}.subset: it is '{source.subset}', a file has no subsets; leave it out")
    if source.options and path.suffix.lower() in JSON_LINES:
        raise ConfigError(
            f"{who}.options: {', '.join(source.options)}: no effect on a file of JSON lines; leave it out"
        )


def _line_rows(path: Path, who: str) -> Iterator[Row]:
    """One JSON object a line; blank lines are passed over. Read here: `datasets` cannot name a bad line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as cause:
                raise ConfigError(f"{who}: '{path}' line {number} is not JSON: {cause}") from cause
            if not isinstance(values, dict):
                found = type(values).__name__
                raise ConfigError(f"{who}: '{path}' line {number} is a {found}, needed is an object with a prompt")
            yield Row(f"line {number}", values)


def _table_rows(source: SourceConfig, path: Path, who: str) -> Iterator[Row]:
    with _datasets(f"{who}: '{path}'") as (datasets, in_memory):
        read = datasets.Dataset.from_csv if path.suffix.lower() == ".csv" else datasets.Dataset.from_parquet
        yield from _numbered(read(str(path), **in_memory, **source.options))


def _dataset_rows(source: SourceConfig, path: Path, who: str) -> Iterator[Row]:
    """A hub dataset, or a directory with data files or what `save_to_disk` wrote."""
    with _datasets(f"{who}: dataset '{source.path}'") as (datasets, in_memory):
        if not path.is_dir():
            subset = source.subset or None
            yield from _numbered(datasets.load_dataset(source.path, subset, split=source.split, **source.options))
        elif (path / "dataset_dict.json").exists():
            yield from _numbered(datasets.load_from_disk(str(path), keep_in_memory=True)[source.split])
        elif (path / "state.json").exists():
            yield from _numbered(datasets.load_from_disk(str(path), keep_in_memory=True))
        else:
            arguments = {"split": source.split, **in_memory, **source.options}
            yield from _numbered(datasets.load_dataset(str(path), source.subset or None, **arguments))


@contextmanager
def _datasets(whose: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The library without its progress bars, and arguments that keep local data in memory and out of the user's cache.

    What it raises becomes a ConfigError naming `whose` data it was.
    """
    import datasets
    from tqdm import tqdm  # type: ignore[import-untyped]

    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0  # a bar, also a silent one, starts a thread that stays
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with boundary(whose, ConfigError), tempfile.TemporaryDirectory(prefix="rlcore-data-") as scratch:
            yield datasets, {"cache_dir": scratch, "keep_in_memory": True}
    finally:
        tqdm.monitor_interval = interval
        if not silent:
            datasets.enable_progress_bars()


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    return (Row(f"row {index}", values) for index, values in enumerate(rows))


def _task_rows(source: SourceConfig, who: str) -> Iterator[Row]:
    """The distinct questions of a reasoning_gym task that belong to the split.

    A question belongs to the held-out split if the hash of its text says so: item i is made from Random(seed + i), so
    that two seeds give overlapping items, and only the text can keep the splits apart for every seed and size.
    """
    if source.split not in ("train", "heldout"):
        raise ConfigError(f"{who}.split: it is '{source.split}', a task has the splits train and heldout")
    if not 0.0 <= source.heldout_frac <= 1.0:
        raise ConfigError(f"{who}.heldout_frac: it is {source.heldout_frac}, needed is a share between 0 and 1")
    create = _task_factory(source, who)
    seen: set[str] = set()
    # the tasks check their options by assert
    with boundary(f"{who}: reasoning_gym task '{source.task}'", ConfigError):
        for problem in create(source.task, size=source.size, seed=source.seed, **source.options):
            question = normalised(problem["question"])
            if question in seen:
                continue
            seen.add(question)
            if _is_heldout(question, source.heldout_frac) == (source.split == "heldout"):
                yield Row(f"row {len(seen) - 1}", {**problem, "task": source.task})


def _task_factory(source: SourceConfig, who: str) -> Callable[..., Iterable[Mapping[str, Any]]]:
    try:
        import reasoning_gym
    except ImportError as cause:
        raise ConfigError(
            f"{who}.task: reasoning_gym is not installed; install it with: pip install 'rlcore[tasks]'"
        ) from cause
    known = tuple(reasoning_gym.factory.DATASETS)
    if source.task not in known:
        raise ConfigError(f"{who}.task: reasoning_gym has no task '{source.task}'; {nearest(source.task, known)}")
    create: Callable[..., Iterable[Mapping[str, Any]]] = reasoning_gym.create_dataset
    return create


def _is_heldout(question: str, heldout_frac: float) -> bool:
    digest = hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < heldout_frac * 2**64
