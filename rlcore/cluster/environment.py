"""The environment variables of child processes, and the first message to one."""

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rlcore
from rlcore.imports import FILE_DIRECTORIES

NEEDED = frozenset(
    (
        *("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH"),
        *("LOGNAME", "PATH", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TEMP", "TMP", "TMPDIR", "TZ", "USER"),
        *("VIRTUAL_ENV", "XDG_CACHE_HOME"),
    )
)
"""Variables that programs need to find their files and to use the user's language."""
NEEDED_PREFIXES = ("LC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "RLCORE_REWARD_")


def inherited(names: Sequence[str] | None) -> dict[str, str]:
    """Our environment (None), or only its required and named variables; includes the path of this rlcore.

    The child restores PYTHONPATH itself.
    """
    here = str(Path(rlcore.__file__).parent.parent)
    before = os.environ.get("PYTHONPATH")
    ours = {key: value for key, value in os.environ.items() if names is None or key in names or _is_needed(key)}
    return {**ours, "PYTHONPATH": f"{here}{os.pathsep}{before}" if before else here}


def _is_needed(name: str) -> bool:
    return name in NEEDED or name.startswith(NEEDED_PREFIXES)


def start_message(name: str, target: str, args: Sequence[Any], threads: int, max_bytes: int) -> dict[str, Any]:
    """The first message to a child: the object to create, and the search path to import it with."""
    return {
        "name": name,
        "target": target,
        "args": pickle.dumps(tuple(args)),
        "threads": threads,
        "max_bytes": max_bytes,
        "path": [entry or str(Path.cwd()) for entry in sys.path],
        "file_directories": sorted(FILE_DIRECTORIES),
        "environment": {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ},
    }
