"""JSON Lines files, possibly still being written."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rlcore_view.file_memory import FileMemory, lines_of, opened
from rlcore_view.model import ViewError

Made = TypeVar("Made")


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of the file, without an unfinished last line. ViewError names a line that is not an object."""
    try:
        with opened(path) as file:
            for number, line in enumerate(lines_of(file, path), 1):
                if line.strip() and line.endswith(b"\n"):
                    yield _record(line, path, number)
    except OSError as error:
        raise ViewError(f"'{path}': it cannot be read: {error.strerror or error}") from error


def made_of(path: Path, make: Callable[[dict[str, Any]], Made]) -> Iterator[Made]:
    """Results of `make` for each record of the file; ViewError names a record with fields of the wrong type."""
    for number, record in enumerate(records(path), 1):
        with fields_expected(f"'{path}', record {number}"):
            made = make(record)
        yield made


def made_again(path: Path, make: Callable[[dict[str, Any]], Made], memory: FileMemory) -> list[Made]:
    """`made_of` as a list, without rereading records that were read before."""

    def of_line(line: bytes, number: int) -> Made | None:
        if not line.strip():
            return None
        record = _record(line, path, number)
        with fields_expected(f"'{path}', record {number}"):
            return make(record)

    return memory.lines(path, of_line)[0]


@contextmanager
def fields_expected(where: str) -> Iterator[None]:
    """Turns a reader's errors about missing fields or wrong types into a ViewError that names the place."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ViewError(
            f"{where}: its fields are not those of this format: {type(error).__name__}: {str(error)[:200]}; fix or "
            "remove it"
        ) from error


def first_record(path: Path) -> dict[str, Any] | None:
    """The first object, to guess the format; None if the file does not begin with one."""
    try:
        return next(records(path), None)
    except ViewError:
        return None


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ViewError(f"'{path}', line {number}: {line[:60]!r} is not a JSON object; fix or remove the line")
    return record


def score_or_none(value: Any) -> float | None:
    """The value if it is a finite number, 1 for True and 0 for False."""
    return float(value) if isinstance(value, bool) else number_or_none(value)


def number_or_none(value: Any) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value)
    return number if number - number == 0 else None  # infinities and NaN minus themselves are NaN
