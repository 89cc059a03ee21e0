"""Directories of the Rays that this process starts: their logs, and all that workers print, without a limit."""

import contextlib
import os
import shutil
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir


def session_directories() -> frozenset[Path]:
    """Directories of all Rays that this process has started, also of one that failed before it named its directory."""
    return frozenset(Path(get_default_ray_temp_dir()).glob(f"session_*_{os.getpid()}"))


def remove(directory: Path) -> None:
    """Remove the directory of a session that has ended, and Ray's link to it, which Ray would not replace then."""
    latest = directory.parent / "session_latest"
    with contextlib.suppress(OSError):
        if latest.readlink() == directory:
            latest.unlink()
    shutil.rmtree(directory, ignore_errors=True)
