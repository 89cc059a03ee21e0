"""A run on disk as a configuration, to resume it, evaluate it or chat with it."""

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
"""Directory of a run with the rows and the sources of functions that came from Python."""


@dataclass(frozen=True)
class SavedRun:
    """A directory that a run has written."""

    path: Path

    def plan(self, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> RunPlan:
        """The plan by the run's own configuration, in this directory, with `overrides` over it."""
        return plan_run([self.path / CONFIG, self.settings()], overrides, plugins)

    def settings(self) -> dict[str, Any]:
        """Values laid over the run's configuration, by dotted key: where its directory and its inputs are now."""
        return {"train.dir": str(self.path.parent), "train.name": self.path.name, **self._moved_inputs()}

    def _moved_inputs(self) -> dict[str, str]:
        """Keys that name a file of the run's inputs by the place where the run was begun, with the file's place now."""
        moved = {}
        for key, value in leaves(read_file(self.path / CONFIG).values):
            where, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
            path = Path(where if colon and where.endswith(".py") else str(value))
            now = self.path / INPUTS / path.name
            if path.parent.name == INPUTS and now != path and now.is_file() and not path.exists():
                moved[key] = f"{now}:{name}" if colon and where.endswith(".py") else str(now)
        return moved


def open_run(path: Path) -> SavedRun:
    """The run at `path`, a run directory or something in it, such as a checkpoint; ConfigError when it is not a run."""
    full = path.expanduser().absolute()
    for place in (full, *full.parents[:2]):
        if (place / CONFIG).is_file() and not (place / "manifest.json").exists():
            return SavedRun(place)
    found = "found no such directory" if not full.exists() else f"found no {CONFIG} in it"
    raise ConfigError(f"'{path}': is not a run: {found}; needs a directory that rlcore train has written")
