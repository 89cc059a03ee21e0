"""Compares the software of worker processes with the controller's.

Children of one machine are started from one installation; nodes of a cluster may have several. Versions are compared
everywhere. Every commit of a checkout has the same version, so on a cluster whose workers run on other machines the
Python files of rlcore and of the enabled plugins are compared, too:

* The controller takes their digests once, when the run starts. What a worker on another machine reads later has to
  equal them, also when it is restarted after files were edited: otherwise one run would compute with two programs.
* A worker on the controller's machine that imports the same files is never refused: an editable installation with
  local edits is ordinary there, and digests would cost each run on one machine some 20 ms.
"""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from rlcore import __version__
from rlcore.config.providers import Provider
from rlcore.contracts.clusters import RunCode
from rlcore.errors import WorkerError

MISSING = "missing"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs between machines whose names are the same, such as those of containers."""


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


def code_of(plugins: Sequence[Provider]) -> RunCode:
    """The code of this process that the workers of a run have to have: rlcore's and that of these plugins."""
    packages = {plugin.package for plugin in plugins if plugin.package} - {"rlcore"}
    files = {plugin.distribution for plugin in plugins if plugin.distribution.endswith(".py")}
    names = ("rlcore", *sorted(packages), *sorted(files))
    return RunCode(_machine(), {name: _place(name) for name in names}, {name: digest(name) for name in names})


def check_code(needed: RunCode) -> None:
    """WorkerError naming both sides if this process has other code than the controller had when the run started.

    Files that the two share are not compared: those at the same paths of the same machine.
    """
    shared = needed.machine == _machine()
    compared = [name for name, place in needed.places.items() if not shared or place != _place(name)]
    different = [name for name in compared if digest(name) != needed.digests[name]]
    if different:
        ours = ", ".join(f"{name} {digest(name)}" for name in different)
        theirs = ", ".join(f"{name} {needed.digests[name]}" for name in different)
        raise WorkerError(
            f"node {os.uname().nodename} has code with the digests {ours}, and the run was started on "
            f"{needed.machine.split()[0]} with {theirs}; needs the same files on every node during the "
            "whole run: install one of them everywhere, or keep the run off this node (the labels of its pools)"
        )


@cache
def digest(name: str) -> str:
    """A short digest of the names and contents of a package's Python files, or of a single file; 'missing' if there is
    none. It is taken once per process."""
    found = blake2b(digest_size=6)
    roots = _roots(name)
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            content = path.read_bytes()
            found.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest() if roots else MISSING


def _roots(name: str) -> list[Path]:
    """The directories of a package, or the file of a module or of a plugin in a plain file; none if it is missing."""
    if name.endswith(".py"):
        return [path for path in [Path(name)] if path.is_file()]
    spec = find_spec(name)
    if spec is None:
        return []
    places = spec.submodule_search_locations or [spec.origin or ""]
    return [path for path in map(Path, places) if path.exists()]


def _place(name: str) -> str:
    """The paths that a package is imported from."""
    return " ".join(str(root.resolve()) for root in _roots(name))


def _machine() -> str:
    """This machine: its name, and an id of its boot where there is one."""
    boot = BOOT_ID.read_text("utf-8").strip() if BOOT_ID.is_file() else ""
    return f"{os.uname().nodename} {boot}"


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
