"""Reads the files of a run again while it is written: the rest of those that have grown, and others if they changed."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rlcore_view.model import ViewError

Made = TypeVar("Made")
_TAIL = 1024
"""Bytes before the offset that must be as they were; else the file was cut back, and is read from its beginning."""

MAX_BYTES = 256 << 20
"""Of a line, and of a file of settings: what has more is not one that a trainer wrote."""

Stamp = tuple[int, int, int]


@dataclass
class _GrownFile:
    """A file that grows, as far as it has been read."""

    inode: int
    offset: int = 0
    """Whole lines are known up to here."""
    number: int = 0
    """Lines up to there."""
    tail: bytes = b""
    """The last bytes before the offset."""
    made: list[Any] = field(default_factory=list)
    rest: bytes = b""
    """The bytes behind the offset."""
    stamp: Stamp | None = None
    """Of the file when all of it had been read."""


class FileMemory:
    """Remembers what was made of files, and reads what is new."""

    def __init__(self) -> None:
        self._whole: dict[tuple[Path, ...], tuple[list[Stamp | None], Any]] = {}
        self._grown: dict[Path, _GrownFile] = {}

    def whole(self, paths: Sequence[Path], make: Callable[[], Made]) -> Made:
        """The result of `make`, which reads these files; made again only where one of them has changed."""
        stamps, key = [_stamp(path) for path in paths], tuple(paths)
        known = self._whole.get(key)
        if known is None or known[0] != stamps:
            known = self._whole[key] = stamps, make()
        made: Made = known[1]
        return made

    def lines(
        self,
        path: Path,
        make: Callable[[bytes, int], Made | None],
        ends: tuple[bytes, ...] = (b"\n",),
        most_bytes: int | None = None,
    ) -> tuple[list[Made], bytes]:
        """Results of `make` for (line, its number), but None; and what is behind the last line with such an end.

        Lines that were read before are not read again, unless the file was cut back or replaced. `most_bytes`: of a
        file that is read for the first time, only so many are, the last ones. ViewError if it cannot be read.
        """
        stamp, known = _stamp(path), self._grown.get(path)
        if known is None or stamp is None or known.stamp != stamp:
            try:
                with opened(path) as file:
                    known = self._grown[path] = _going_on(known, file.fileno(), most_bytes)
                    file.seek(known.offset)
                    _read_lines(known, list(lines_of(file, path)), make, ends)
            except OSError as error:
                raise ViewError(f"'{path}': it cannot be read: {error.strerror or error}") from error
            known.stamp = stamp
        return known.made, known.rest


def opened(path: Path) -> BinaryIO:
    """The file, opened to be read; ViewError if it cannot be, or is a pipe or a device, which may never end."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ViewError(f"'{path}': it is not a file; remove it")
        return path.open("rb")
    except OSError as error:
        raise ViewError(f"'{path}': it cannot be read: {error.strerror or error}") from error


def whole_file(path: Path) -> bytes:
    """The content of a file that is read at once, such as one of settings; ViewError for a larger one."""
    with opened(path) as file:
        data = file.read(MAX_BYTES)
    if len(data) == MAX_BYTES:
        raise ViewError(f"'{path}': it has {MAX_BYTES >> 20} MiB or more, which no run writes; remove it")
    return data


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of the file; ViewError where one is longer than any that a run writes."""
    while line := file.readline(MAX_BYTES):
        if len(line) == MAX_BYTES:
            raise ViewError(f"'{path}': a line has {MAX_BYTES >> 20} MiB or more; fix or remove the file")
        yield line


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _going_on(known: _GrownFile | None, descriptor: int, most_bytes: int | None) -> _GrownFile:
    """The same, if the file still has what was read of it; else a new one."""
    found = os.fstat(descriptor)
    if known is not None and known.inode == found.st_ino:
        begin = known.offset - len(known.tail)
        if os.pread(descriptor, len(known.tail), begin) == known.tail:
            return known
    return _GrownFile(found.st_ino, 0 if most_bytes is None else max(0, found.st_size - most_bytes))


def _read_lines(
    known: _GrownFile, lines: Sequence[bytes], make: Callable[[bytes, int], Any], ends: tuple[bytes, ...]
) -> None:
    last = max((number for number, line in enumerate(lines, 1) if line.endswith(ends)), default=0)
    known.stamp, known.rest = None, b"".join(lines[last:])
    for line in lines[:last]:
        made = make(line, known.number + 1)  # may raise: then this line is read again the next time
        if made is not None:
            known.made.append(made)
        known.number += 1
        known.offset += len(line)
        known.tail = (known.tail + line[-_TAIL:])[-_TAIL:]
