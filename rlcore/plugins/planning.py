"""The plan of a run, from configuration, plugins and this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.plan import RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.runtime.machine import gather_facts


def plan_run(
    files: Sequence[Path | Mapping[str, Any]], overrides: Sequence[str], plugins: Sequence[str] = ()
) -> RunPlan:
    """The plan of a run on this machine, from configuration files, overrides and --plugin names; starts nothing."""
    hooks, loaded = configure(files, overrides, plugins)
    return make_plan(loaded, hooks, gather_facts(loaded.config))
