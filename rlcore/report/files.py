"""Writes files so that a crash leaves the old content or the new."""

import os
from pathlib import Path


class FileOperations:
    """The changes that saving makes to the file system; tests pass a version that fails or dies at the k-th call."""

    def make_directory(self, path: Path) -> None:
        """Create the directory; its parent exists."""
        path.mkdir()

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace the file; its content is on the disk only after `sync`."""
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Force a file's content, or a directory's entries, to the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename; a file replaces an existing file of that name in one step."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()


FILES = FileOperations()


def write_atomically(path: Path, data: bytes, files: FileOperations = FILES) -> None:
    """Write a file so that a crash leaves the old content or the new; the new is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    if os.path.lexists(temporary):  # left by a crash; a link would overwrite its target, a pipe would wait
        files.remove(temporary)
    files.write(temporary, data)
    files.sync(temporary)
    files.rename(temporary, path)
    files.sync(path.parent)
