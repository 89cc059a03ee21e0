"""Records the code of a run's rewards: the file of every reward function with its hash."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.contracts.components import ResolvedReward
from rlcore.plan.sources import source_file


def reward_provenance(rewards: Iterable[ResolvedReward]) -> dict[str, dict[str, Any]]:
    """By function: its target, its provider, the file's path and its sha256 (None without source).

    Imports nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, target, reward in _functions(rewards):
        path = source_file(target)
        found[name] = {
            "target": target,
            "provided_by": reward.provided_by,
            "path": str(path) if path else None,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path else None,
        }
    return found


def copy_reward_files(rewards: Iterable[ResolvedReward], directory: Path) -> Mapping[str, Path]:
    """Copy the bare files among the rewards' targets to `directory`, as '<function>_<file>'; by function's name.

    Modules of installed packages are not copied: their distribution's version is in the plan.
    """
    copies: dict[str, Path] = {}
    for name, target, _ in _functions(rewards):
        where = Path(target.rpartition(":")[0])
        if where.suffix == ".py" and where.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            copies[name] = directory / f"{name}_{where.name}"
            shutil.copyfile(where, copies[name])
    return copies


def _functions(rewards: Iterable[ResolvedReward]) -> Iterator[tuple[str, str, ResolvedReward]]:
    """Name and target of every function, those that look at groups as '<function>.post_process'."""
    for reward in rewards:
        yield reward.name, reward.target, reward
        if reward.post_process:
            yield f"{reward.name}.post_process", reward.post_process, reward
