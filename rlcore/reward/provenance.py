"""Which code judged: the file of every reward function with its hash, kept with the run."""

import hashlib
import importlib.machinery
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlcore.plan import ResolvedReward


def reward_provenance(rewards: Iterable[ResolvedReward]) -> dict[str, dict[str, Any]]:
    """By function: its reference, who provided it, the file's path and its sha256 (None where there is no source).

    Imports nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    for reward in rewards:
        path = source_file(reward.reference)
        found[reward.name] = {
            "reference": reward.reference,
            "provided_by": reward.provided_by,
            "path": str(path) if path else None,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path else None,
        }
    return found


def copy_reward_files(rewards: Iterable[ResolvedReward], directory: Path) -> Mapping[str, Path]:
    """Copy the bare files among the rewards' references to `directory`, as '<function>_<file>'; by function's name.

    Modules of installed packages are not copied: their distribution's version is in the plan.
    """
    copies: dict[str, Path] = {}
    for reward in rewards:
        where = Path(reward.reference.rpartition(":")[0])
        if where.suffix == ".py" and where.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            copies[reward.name] = directory / f"{reward.name}_{where.name}"
            shutil.copyfile(where, copies[reward.name])
    return copies


def source_file(reference: str) -> Path | None:
    """The file that a reference 'module:attr' or 'file.py:attr' will be loaded from, found without importing it."""
    where = reference.rpartition(":")[0]
    if where.endswith(".py"):
        path = Path(where)
        return path if path.is_file() else None
    parts = where.split(".")
    search: list[str] | None = None
    for part in parts[:-1]:
        package = importlib.machinery.PathFinder.find_spec(part, search)
        if package is None or package.submodule_search_locations is None:
            return None
        # A namespace package computes its places from its parent in sys.modules, which is not imported here.
        search = _namespace(part, search) if package.origin is None else list(package.submodule_search_locations)
    spec = importlib.machinery.PathFinder.find_spec(parts[-1], search)
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin if origin is not None and origin.is_file() else None


def _namespace(name: str, search: list[str] | None) -> list[str]:
    """The directories of a package without __init__.py."""
    places = [Path(each) / name for each in (sys.path if search is None else search)]
    return [str(each) for each in places if each.is_dir()]
