"""The rows of files of JSON."""

import json
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlcore.errors import ConfigError, boundary

JSON_LINES = frozenset({".jsonl", ".ndjson"})
JSON = ".json"
"""Suffix of a file that is one list of objects, or one object per line."""
MAX_LINE = 1 << 28
"""Most bytes of one line of JSON; a file without line breaks would take all memory."""
MAX_LIST = 1 << 30
"""Most bytes of a file that is one list of JSON, which is read at once."""
GZIP = b"\x1f\x8b"
"""The first bytes of a file that is compressed by gzip."""


UTF_16 = (BOM_UTF16_LE + "{".encode("utf-16-le"), BOM_UTF16_BE + "{".encode("utf-16-be"))
"""The first bytes of an object in UTF-16, as PowerShell's `>` writes it."""


class Row(NamedTuple):
    """One row of a source, and its name in errors."""

    where: str
    """'line 3' of a file of lines, else 'row 2'; after the file's name if the source has several."""
    values: Mapping[str, Any]


def json_rows(path: Path, who: str) -> Iterator[Row]:
    """The rows of a file whose suffix is one of JSON's, read one by one from a file of lines."""
    return _line_rows(path, who) if path.suffix.lower() in JSON_LINES else _list_rows(path, who)


def _line_rows(path: Path, who: str) -> Iterator[Row]:
    """One JSON object per line, without blank lines. Not read by `datasets`, which cannot name a bad line."""
    with _reading(path, who) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise ConfigError(f"{who}: '{path}' line {number} has more than {MAX_LINE >> 20} MiB; divide it")
            if not line.strip():
                continue
            try:
                values = json.loads(line, object_pairs_hook=_unambiguous)
            except (ValueError, RecursionError) as cause:
                if line.startswith(UTF_16):
                    remedy = "needs UTF-8: iconv -f UTF-16 -t UTF-8 FILE > ROWS.jsonl"
                    raise ConfigError(f"{who}: '{path}' is in UTF-16; {remedy}") from cause
                raise ConfigError(f"{who}: '{path}' line {number} is not JSON: {cause}") from cause
            if not isinstance(values, dict):
                found = type(values).__name__
                raise ConfigError(f"{who}: '{path}' line {number} is a {found}; needs an object with a prompt")
            yield Row(f"line {number}", values)


def _list_rows(path: Path, who: str) -> Iterator[Row]:
    """The objects of one list, or of the lines of a file that is not one JSON value or too large to be one."""
    with _reading(path, who) as file:
        is_list = file.read(1024).lstrip().startswith(b"[")
        is_small = os.fstat(file.fileno()).st_size <= MAX_LIST
        file.seek(0)
        content = file.read() if is_small else b""
    if not is_small and is_list:
        raise ConfigError(
            f"{who}: '{path}' is a list of more than {MAX_LIST >> 20} MiB, which is read at once; write one object per "
            "line into a .jsonl file"
        )
    try:
        values = json.loads(content, object_pairs_hook=_unambiguous)
    except _Ambiguous as cause:
        raise ConfigError(f"{who}: '{path}': {cause}") from cause
    except (ValueError, RecursionError) as cause:
        if is_list and is_small:
            raise ConfigError(f"{who}: '{path}' is not JSON: {cause}") from cause
        yield from _line_rows(path, who)
        return
    if not isinstance(values, list):
        raise ConfigError(f"{who}: '{path}' is {_kind(values)}; needs a list of objects, or one object per line")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise ConfigError(f"{who}: '{path}' row {index} is {_kind(value)}; needs an object with a prompt")
        yield Row(f"row {index}", value)


@contextmanager
def _reading(path: Path, who: str) -> Iterator[BinaryIO]:
    """The file; ConfigError if it cannot be read or is compressed."""
    with boundary(f"{who}: '{path}'", ConfigError, OSError), path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise ConfigError(f"{who}: '{path}' is compressed by gzip; unpack it: gunzip -c FILE > ROWS.jsonl")
        file.seek(0)
        yield file


class _Ambiguous(ValueError):
    """An object has a key twice: Python takes the last value, other readers take the first."""


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Ambiguous(f"the key '{next(key for key in keys if keys.count(key) > 1)}' occurs twice in one object")
    return values


def _kind(value: object) -> str:
    return "an object" if isinstance(value, dict) else f"of type {type(value).__name__}"
