"""Writes rows from Python as a file of JSON lines, so that a run trains and resumes without the object."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlcore.errors import ConfigError, describe
from rlcore.train.python.shared_functions import describe_type

FORMS = "needs a path, a list of dicts, a datasets.Dataset, or these by the names of sources"


def is_rows(data: Any) -> bool:
    """True if `rows_as_lines` accepts the data."""
    is_sequence = isinstance(data, Sequence) and not isinstance(data, (str, bytes))
    return is_sequence or (_is_dataset(data) and hasattr(data, "__len__") and not isinstance(data, Mapping))


def check_form(data: Any, who: str) -> None:
    """Raise ConfigError, beginning with `who`: data of this form cannot be a source, and how to convert it."""
    if isinstance(data, Mapping) and _is_dataset(data):
        raise ConfigError(f"{who}: found the splits {', '.join(map(str, data))}; needs one, such as ds['train']")
    if _is_dataset(data) and not hasattr(data, "__len__"):
        raise ConfigError(f"{who}: found a stream without a length; needs rows, such as list(stream.take(1000))")
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        raise ConfigError(f"{who}: found {describe_type(data)}; needs rows, such as frame.to_dict('records')")
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)) and not is_rows(data):
        raise ConfigError(f"{who}: found {describe_type(data)}, which can be read once; needs a list of dicts")
    raise ConfigError(f"{who}: found {describe_type(data)}; {FORMS}")


def check_no_columns(sources: Mapping[str, Any], who: str) -> None:
    """ConfigError, beginning with `who`, if the mapping holds columns instead of sources by name."""
    for name, source in sources.items():
        if isinstance(source, (list, tuple)) and source and isinstance(source[0], (str, int, float)):
            raise ConfigError(
                f"{who}: '{name}' is a list of {type(source[0]).__name__}; needs a list of dicts for each source, or "
                "of columns datasets.Dataset.from_dict(...)"
            )


def rows_as_lines(rows: Any, who: str) -> bytes:
    """A line of JSON per row; arrays and numbers of numpy become lists and numbers.

    ConfigError, beginning with `who`, for no rows, a row that is not a mapping with text keys, and a value that is not
    JSON.
    """
    lines = [_line(row, f"{who}: row {index}") for index, row in enumerate(rows)]
    if not lines:
        raise ConfigError(f"{who}: it has no rows; needs at least one, with a prompt")
    return b"".join(lines)


def _line(row: Any, who: str) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{who} is {describe_type(row)}; needs a dict, such as {{'prompt': ..., 'answer': ...}}")
    for name, value in row.items():
        if not isinstance(name, str):
            raise ConfigError(f"{who} has the column {name!r}; needs names that are text")
        _check_keys(value, f"{who}, column '{name}'")
        try:
            json.dumps(value, default=_from_numpy)
        except (TypeError, ValueError, RecursionError) as cause:
            raise ConfigError(
                f"{who}, column '{name}' is {describe_type(value)}, which is not JSON ({describe(cause)}); needs "
                "texts, numbers, lists and dicts"
            ) from cause
    return json.dumps(dict(row), default=_from_numpy).encode() + b"\n"


def _check_keys(value: Any, who: str) -> None:
    """ConfigError for keys that are not text: JSON would convert them, and a row read back would differ."""
    level = [value]
    for _ in range(64):  # the reader of rows refuses deeper nesting
        for found in level:
            if isinstance(found, Mapping) and (odd := [key for key in found if not isinstance(key, str)]):
                raise ConfigError(f"{who} has the key {odd[0]!r}; needs keys that are text")
        level = [
            inner
            for found in level
            if isinstance(found, (Mapping, list, tuple))
            for inner in (found.values() if isinstance(found, Mapping) else found)
        ]
        if not level:
            return


def _from_numpy(value: Any) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"found {describe_type(value)}")


def _is_dataset(data: Any) -> bool:
    return type(data).__module__.partition(".")[0] == "datasets"
