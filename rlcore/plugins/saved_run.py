"""A run on disk as a configuration, to resume it, evaluate it or chat with it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config.layers import leaves, read_file
from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run

CONFIG = "config.yaml"
INPUTS = "inputs"
"""Directory in a run for the rows and function sources that a caller passed from Python."""


@dataclass(frozen=True)
class SavedRun:
    """A directory that a run has written."""

    path: Path

    def plan(
        self, overrides: Sequence[str] = (), plugins: Sequence[str] = (), *, only_sampling: bool = False
    ) -> RunPlan:
        """The plan of the run's own configuration, in this directory; `overrides` take precedence.

        `only_sampling`: see `plan_run`.
        """
        return plan_run([self.path / CONFIG, self.settings()], overrides, plugins, only_sampling=only_sampling)

    def settings(self) -> dict[str, Any]:
        """Values that replace those of the run's configuration, by dotted key: the current paths of run and inputs."""
        return {"train.dir": str(self.path.parent), "train.name": self.path.name, **self._moved_inputs()}

    def _moved_inputs(self) -> dict[str, str]:
        """The current path of each input file, by the key that still has the path where the run was started."""
        moved = {}
        for key, value in leaves(read_file(self.path / CONFIG).values):
            where, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
            path = Path(where if colon and where.endswith(".py") else str(value))
            now = self.path / INPUTS / path.name
            if path.parent.name == INPUTS and now != path and now.is_file() and not path.exists():
                moved[key] = f"{now}:{name}" if colon and where.endswith(".py") else str(now)
        return moved


def open_run(path: Path) -> SavedRun:
    """The run at `path`, a run directory or a path in it, such as a checkpoint; ConfigError if it is not a run."""
    full = Path(os.path.normpath(path.expanduser().absolute()))  # the parent of `..` is not its directory
    for place in (full, *full.parents[:2]):
        if (place / CONFIG).is_file() and not (place / "manifest.json").exists():
            return SavedRun(place)
    found = "found no such directory" if not full.exists() else f"found no {CONFIG} in it"
    raise ConfigError(f"'{path}': is not a run: {found}; needs a directory that rlcore train has written")


def open_to_resume(path: Path) -> SavedRun:
    """The run in the directory `path`; ConfigError also for a path in it, because a run continues after its newest
    checkpoint."""
    run = open_run(path)
    if path.expanduser().resolve() != run.path.resolve():
        raise ConfigError(
            f"'{path}': is in the run '{run.path}', which continues after its newest checkpoint; name the run, or "
            f"begin another one here: rlcore train ... --resume-from {path}"
        )
    return run
