"""Which code judged: the file of every reward function with its hash, kept with the run."""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlcore.plan import ResolvedReward
from rlcore.plan.sources import source_file


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
