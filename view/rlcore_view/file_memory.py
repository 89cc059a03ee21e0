"""Rereads the files of a growing run: only the new part of files that grew, and others only if they changed."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rlcore_view.model import ViewError

Made = TypeVar("Made")
_TAIL = 1024
"""Bytes before the offset that must be unchanged; otherwise the file is read from the start."""

MAX_BYTES = 256 << 20
"""Most bytes of a line or a settings file; no trainer writes a larger one."""

Stamp = tuple[int, int, int]


@dataclass
class _GrownFile:
    """A growing file, as far as it has been read."""

    inode: int
    offset: int = 0
    """Complete lines are known up to here."""
    number: int = 0
    """Number of lines up to there."""
    tail: bytes = b""
    """The last bytes before the offset."""
    made: list[Any] = field(default_factory=list)
    rest: bytes = b""
    """The bytes after the offset."""
    stamp: Stamp | None = None
    """The file's stamp when all of it had been read."""


class FileMemory:
    """Remembers the results made from files, and reads only what is new."""

    def __init__(self) -> None:
        self._whole: dict[tuple[Path, ...], tuple[list[Stamp | None], Any]] = {}
        self._grown: dict[Path, _GrownFile] = {}

    def whole(self, paths: Sequence[Path], make: Callable[[], Made]) -> Made:
        """The result of `make`, which reads these files; made again only if one of them has changed."""
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
        """Results of `make` for (line, its number), without None; and the bytes after the last line with such an end.

        Lines that were read before are not read again, unless the file was truncated or replaced. `most_bytes`: read
        only the last so many bytes of a file that is new. ViewError if it cannot be read.
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
    """The file, opened for reading; ViewError if it cannot be, or is a pipe or a device, which may never end."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ViewError(f"'{path}': it is not a file; remove it")
        return path.open("rb")
    except OSError as error:
        raise ViewError(f"'{path}': it cannot be read: {error.strerror or error}") from error


def whole_file(path: Path) -> bytes:
    """The content of a small file, such as settings; ViewError for one that is too large."""
    with opened(path) as file:
        data = file.read(MAX_BYTES)
    if len(data) == MAX_BYTES:
        raise ViewError(f"'{path}': it has {MAX_BYTES >> 20} MiB or more, which no run writes; remove it")
    return data


def lines_of(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of the file; ViewError if one is longer than any that a run writes."""
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
    """The known state if the file still starts with what was read; otherwise a new one."""
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
        made = make(line, known.number + 1)  # may raise; then this line is read again next time
        if made is not None:
            known.made.append(made)
        known.number += 1
        known.offset += len(line)
        known.tail = (known.tail + line[-_TAIL:])[-_TAIL:]
