"""A caller's request in Python, from arguments to a plan."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.plugins import configure
from rlcore.plugins.planning import plan_run
from rlcore.plugins.saved_run import INPUTS
from rlcore.report.metrics import has_results
from rlcore.train.python.inputs import Inputs, gather_inputs
from rlcore.train.python.shared_functions import describe_type
from rlcore.train.run_dir import (
    choose_directory,
    is_unused,
    locked,
    open_directory,
    removed_without_results,
)

Config = str | os.PathLike[str] | Mapping[str, Any]
"""A configuration file, the same as nested mappings (keys may be dotted), or one value as 'key=value'."""


@dataclass(frozen=True)
class Request:
    """Configuration, plugins and inputs."""

    sources: tuple[Path | Mapping[str, Any], ...]
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]
    inputs: Inputs

    def plan(self, directory: Path, **further: Any) -> RunPlan:
        """The plan when the files of the inputs are in `directory`."""
        plan = plan_run([*self.sources, {**self.inputs.below(directory), **further}], self.overrides, self.plugins)
        self.inputs.check(plan.config)
        return plan

    @contextmanager
    def planned(self, resume: bool) -> Iterator[RunPlan]:
        """The plan of a run whose directory holds the inputs; removes them if the run leaves no results."""
        if not self.inputs.files:
            yield self.plan(Path())
            return
        _, loaded = configure([*self.sources, self.inputs.below(Path(INPUTS))], self.overrides, self.plugins)
        self.inputs.check(loaded.config)
        run_dir = choose_directory(loaded, resume)
        made = is_unused(run_dir)
        with locked(open_directory(run_dir, resume)):
            self.inputs.write(run_dir / INPUTS, resume)
        try:
            with removed_without_results(run_dir, made):
                yield self.plan(run_dir / INPUTS, **{"train.dir": str(run_dir.parent), "train.name": run_dir.name})
        finally:
            if not has_results(run_dir):
                _remove_inputs(run_dir)

    @contextmanager
    def planned_briefly(self) -> Iterator[RunPlan]:
        """The plan of a call that writes no run directory; its input files are removed on exit."""
        with tempfile.TemporaryDirectory(prefix="rlcore-inputs-") as scratch:
            self.inputs.write(Path(scratch), resume=False)
            yield self.plan(Path(scratch))


def _remove_inputs(run_dir: Path) -> None:
    shutil.rmtree(run_dir / INPUTS, ignore_errors=True)
    with suppress(OSError):  # keep a directory that holds more than the lock
        if {path.name for path in run_dir.iterdir()} <= {".lock"}:
            shutil.rmtree(run_dir)


def request_of(
    config: Sequence[Config],
    plugins: str | Sequence[str],
    model: Any,
    rewards: Any,
    data: Any,
    eval: Any,
    settings: Mapping[str, Any],
) -> Request:
    """Turn the arguments of `rlcore.train` into a request; ConfigError for an argument of the wrong form."""
    sources: list[Path | Mapping[str, Any]] = []
    overrides: list[str] = []
    for part in config:
        if isinstance(part, Mapping):
            sources.append(part)
        elif isinstance(part, str) and "=" in part:
            overrides.append(part)
        elif isinstance(part, (str, os.PathLike)):
            sources.append(Path(part))
        else:
            raise ConfigError(f"config: found {describe_type(part)}; needs a YAML file, a mapping or 'key=value'")
    names = (plugins,) if isinstance(plugins, str) else tuple(plugins)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f"plugins: found {describe_type(odd[0])}; needs names, or paths of .py files as text")
    inputs = gather_inputs(model, rewards, data, eval, settings)
    return Request(tuple(sources), tuple(overrides), names, inputs)
