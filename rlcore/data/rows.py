"""The raw rows of a source: local files, directories, hub datasets, generated tasks."""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlcore.config import SourceConfig
from rlcore.data.conversation import normalised
from rlcore.data.directories import NEEDED_INSIDE, has_rows, json_files, mixture_of, refuse_unsaved, split_rows
from rlcore.data.json_rows import JSON, JSON_LINES, MAX_LINE, Row, json_rows
from rlcore.errors import ConfigError, boundary, nearest

OTHER_FILES = frozenset({".txt", ".tsv", ".xlsx", ".gz", ".zst", ".zip", ".arrow", ".yaml", ".yml", ".pkl", ".md"})
"""Suffixes of files only, not of names on the Hub."""
MAX_DEPTH = 64
"""Most levels of lists and objects in a row."""
TABLES = frozenset({".csv", ".parquet"})
UNNAMED = "__index_level_"
"""Beginning of the name that pyarrow gives to a column of an index without a name."""
NO_ROWS = "corresponds to no data"
"""In the library's error for a table of which only the header is there."""
MAX_NAMED = 12
"""Most files that an error lists."""


def read_rows(source: SourceConfig, who: str) -> list[Row]:
    """The rows of the source, no more than the limit needs; ConfigError, beginning with `who`, if there are none."""
    if bool(source.path) == bool(source.task):
        found = f"path='{source.path}' and task='{source.task}'" if source.path else "neither path nor task"
        raise ConfigError(f"{who}: it has {found}; needs one of them: a file or dataset, or a reasoning_gym task")
    if source.limit < 0:
        raise ConfigError(f"{who}.limit: it is {source.limit}; needs a number of rows, or 0 for all")
    # rows that `keep` leaves out do not count towards the limit
    rows = list(islice(_rows(source, who), None if source.keep else source.limit or None))
    if not rows:
        raise ConfigError(f"{who}: '{source.path or source.task}' has no rows in split '{source.split}'")
    for row in rows:
        if _is_deep(row.values):
            raise ConfigError(
                f"{who}: '{source.path or source.task}' {row.where} is nested more than {MAX_DEPTH} levels deep, too "
                "deep for code that reads it recursively; make it flatter, or keep such values as JSON in a text"
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
    path = check_path(source, who)
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return _table_rows(source, path, who)
    return json_rows(path, who) if suffix in JSON_LINES | {JSON} else _dataset_rows(source, path, who)


def check_path(source: SourceConfig, who: str) -> Path:
    """The path of a source that has one; ConfigError for a file that does not exist or is not of a known kind."""
    path = Path(source.path).expanduser()
    suffix = path.suffix.lower()
    with boundary(f"{who}.path", ConfigError):  # for a name that is too long, or in a directory that cannot be read
        problem = _problem_of(path) or mixture_of(source, path)
        is_file, exists = path.is_file(), path.exists()
        refuse_unsaved(source, path, who)
    if problem:
        raise ConfigError(f"{who}.path: '{source.path}' {problem}")
    if suffix in JSON_LINES | TABLES | {JSON}:
        if not is_file:
            raise ConfigError(
                f"{who}.path: found no file '{source.path}' (looked in {path.absolute().parent}){_others(path)}"
            )
        _refuse_without_effect(source, path, who)
    elif is_file or suffix in OTHER_FILES:
        raise ConfigError(
            f"{who}.path: '{source.path}' is not a kind of file that is read; needs .jsonl (one JSON object per line), "
            ".json (a list of them), .csv or .parquet; docs/data.md"
        )
    elif source.path.startswith(("/", ".", "~")) and not exists:
        raise ConfigError(f"{who}.path: found no directory '{source.path}' (looked for {path.absolute()})")
    return path


def _others(path: Path) -> str:
    """The end of an error about a missing file: the data files in its directory, if they are few."""
    known = JSON_LINES | TABLES | {JSON}
    with suppress(OSError):
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix.lower() in known]
        if 0 < len(names) <= MAX_NAMED:
            return f"; {nearest(path.name, names)}"
    return "; needs a file of rows: docs/data.md"


def _problem_of(path: Path) -> str:
    """The reason why the path cannot hold rows, with what is needed instead; '' if there is none."""
    if path.is_fifo():
        return "is a pipe, which can be read only once; needs a file, so write what comes out of it to one"
    if path.is_symlink() and not path.exists():
        return f"is a link to '{path.readlink()}', which does not exist; needs a file"
    if path.is_dir():
        if path.suffix.lower() in JSON_LINES | TABLES | {JSON}:
            return "is a directory, though its name is that of a file; needs a file, such as one of those in it"
        if not any(path.iterdir()):
            return "is an empty directory; needs one with data files, or a file"
        return "" if has_rows(path) else f"is a directory without files of rows; {NEEDED_INSIDE}, or a file"
    if path.exists() and not path.is_file():
        return "is a device or a socket; needs a file"
    return "" if not path.exists() or os.access(path, os.R_OK) else "cannot be read (permission); needs a readable file"


def _refuse_without_effect(source: SourceConfig, path: Path, who: str) -> None:
    """ConfigError for settings without effect: a file has no splits or subsets, a file of JSON has no options."""
    if source.split != "train":
        raise ConfigError(f"{who}.split: it is '{source.split}', a file has no splits; leave it out, or see `limit`")
    if source.subset:
        raise ConfigError(f"{who}.subset: it is '{source.subset}', a file has no subsets; leave it out")
    if source.options and path.suffix.lower() not in TABLES:
        raise ConfigError(f"{who}.options: {', '.join(source.options)}: no effect on a file of JSON; leave it out")


def _table_rows(source: SourceConfig, path: Path, who: str) -> Iterator[Row]:
    with _datasets(f"{who}: '{path}'") as (datasets, in_memory):
        is_csv = path.suffix.lower() == ".csv"
        if not is_csv and not _num_parquet_rows(path):
            return  # the library divides by the number of rows
        read = datasets.Dataset.from_csv if is_csv else datasets.Dataset.from_parquet
        rows = read(str(path), **in_memory, **source.options)
        if is_csv:
            _refuse_surplus(rows, [path], source, f"{who}: '{path}'")
        yield from _numbered(rows)


def _refuse_surplus(rows: Any, files: Iterable[Path], source: SourceConfig, whose: str) -> None:
    """ConfigError if the first columns of CSV files became an index, because rows have more fields than the header.

    The other columns would have the names, and so the values, of their neighbours.
    """
    surplus = sum(name.startswith(UNNAMED) for name in rows.column_names)
    if not surplus or "index_col" in source.options or any(UNNAMED.encode() in _first_line(file) for file in files):
        return
    named = len(rows.column_names) - surplus
    raise ConfigError(
        f"{whose} has {named + surplus} fields in its first row and {named} in its header; needs a name for each, so "
        "quote fields with a separator in them, or drop what is after the last name by options.index_col=false"
    )


def _first_line(file: Path) -> bytes:
    with file.open("rb") as lines:
        return lines.readline(MAX_LINE)


def _num_parquet_rows(path: Path) -> int:
    import pyarrow.parquet  # type: ignore[import-untyped]

    return int(pyarrow.parquet.read_metadata(path).num_rows)


def _dataset_rows(source: SourceConfig, path: Path, who: str) -> Iterator[Row]:
    """A dataset of the Hub, or a directory with data files or the files of `save_to_disk`."""
    with _datasets(f"{who}: dataset '{source.path}'") as (datasets, in_memory):
        if not path.is_dir():
            subset = source.subset or None
            yield from _numbered(datasets.load_dataset(source.path, subset, split=source.split, **source.options))
        elif (path / "dataset_dict.json").exists():
            yield from _numbered(datasets.load_from_disk(str(path), keep_in_memory=True)[source.split])
        elif (path / "state.json").exists():
            yield from _numbered(datasets.load_from_disk(str(path), keep_in_memory=True))
        else:
            if files := json_files(datasets, source, path, in_memory["cache_dir"]):
                yield from split_rows(datasets, source, path, files, who)
                return
            arguments = {**in_memory, **source.options}
            rows = datasets.load_dataset(str(path), source.subset or None, split=source.split, **arguments)
            if rows.info.builder_name == "csv":
                _refuse_surplus(rows, path.rglob("*.csv"), source, f"{who}: '{path}'")
            yield from _numbered(rows)


@contextmanager
def _datasets(whose: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The library without its progress bars and its log of errors, and arguments that keep local data in memory and
    out of the user's cache.

    Its exceptions become a ConfigError that names the data by `whose`; data without a row passes.
    """
    import datasets
    from tqdm import tqdm  # type: ignore[import-untyped]

    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0  # even a silent bar starts a thread that stays
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    readers = logging.getLogger("datasets.packaged_modules")  # they log what they raise
    level = readers.level
    readers.setLevel(logging.CRITICAL)
    try:
        with boundary(whose, ConfigError), tempfile.TemporaryDirectory(prefix="rlcore-data-") as scratch:
            try:
                yield datasets, {"cache_dir": scratch, "keep_in_memory": True}
            except datasets.exceptions.DatasetGenerationError as error:
                raise error.__cause__ or error from None  # the error itself names no cause
            except ValueError as error:
                if NO_ROWS not in str(error):
                    raise
            except StopIteration:  # the first line of a directory whose .jsonl files have none
                return
    finally:
        tqdm.monitor_interval = interval
        readers.setLevel(level)
        if not silent:
            datasets.enable_progress_bars()


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for index, values in enumerate(rows):
        yield Row(f"row {index}", {name: _without_filling(value) for name, value in values.items()})


def _without_filling(value: Any, *, in_calls: bool = False) -> Any:
    """The value without the nulls in calls of tools: a table gives each call the arguments of all the others."""
    if isinstance(value, list) and value and isinstance(value[0], (list, dict)):
        return [_without_filling(inner, in_calls=in_calls) for inner in value]
    if isinstance(value, dict):
        return {
            key: _without_filling(inner, in_calls=in_calls or key == "tool_calls")
            for key, inner in value.items()
            if not (in_calls and inner is None)
        }
    return value


def _task_rows(source: SourceConfig, who: str) -> Iterator[Row]:
    """The distinct questions of a reasoning_gym task that belong to the split.

    The hash of a question's text decides its split. Item i is made from Random(seed + i), so two seeds give overlapping
    items. Only the text keeps the splits apart for every seed and size.
    """
    if source.split not in ("train", "heldout"):
        raise ConfigError(f"{who}.split: it is '{source.split}', a task has the splits train and heldout")
    if not 0.0 <= source.heldout_frac <= 1.0:
        raise ConfigError(f"{who}.heldout_frac: it is {source.heldout_frac}; needs a share between 0 and 1")
    create = _task_factory(source, who)
    seen: set[str] = set()
    # tasks check their options by assert, so every exception counts
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
            f"{who}.task: reasoning_gym is not installed; install it with: pip install reasoning-gym math-verify"
        ) from cause
    known = tuple(reasoning_gym.factory.DATASETS)
    if source.task not in known:
        raise ConfigError(f"{who}.task: reasoning_gym has no task '{source.task}'; {nearest(source.task, known)}")
    create: Callable[..., Iterable[Mapping[str, Any]]] = reasoning_gym.create_dataset
    return create


def _is_heldout(question: str, heldout_frac: float) -> bool:
    digest = hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < heldout_frac * 2**64
