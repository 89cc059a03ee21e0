"""Compares the software of worker processes with the controller's.

Children of one machine are started from one installation; nodes of a cluster may have several.
"""

import os
import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rlcore import __version__
from rlcore.errors import WorkerError


def versions_here() -> dict[str, str]:
    """Versions that must be equal in all processes of a run, by name; torch is not imported, and may be missing."""
    return {"Python": platform.python_version(), "rlcore": __version__, "torch": _torch_version()}


def check_versions(needed: Mapping[str, str]) -> None:
    """WorkerError naming both sides if the versions of this process differ from the controller's, `needed`."""
    found = versions_here()
    different = [name for name, version in needed.items() if found[name] != version]
    if different:
        ours, theirs = (", ".join(f"{name} {of[name]}" for name in different) for of in (found, needed))
        raise WorkerError(
            f"node {os.uname().nodename} has {ours}, and the run was started with {theirs}; needs the same on every "
            "node: install one of them everywhere, or keep the run off this node (the labels of its pools)"
        )


def _torch_version() -> str:
    """The version in torch's version file; 'missing' or 'unknown' if there is none."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return "missing"
    file = Path(found.origin).parent / "version.py"
    stated = (
        re.search(r"^__version__\b[^=\n]*= *['\"](.+)['\"]$", file.read_text("utf-8"), re.M) if file.is_file() else None
    )
    return stated[1] if stated else "unknown"
