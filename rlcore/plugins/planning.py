"""The plan of a run, from configuration, plugins and this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.fitting import with_layout_that_fits, with_settings_that_fit
from rlcore.plan.machine_plan import Lengths
from rlcore.plan.memory_limits import DeviceMemoryError
from rlcore.plan.pools import PoolSizeError
from rlcore.plugins import configure
from rlcore.report.foreign_output import foreign_output
from rlcore.runtime.machine import gather_facts


@foreign_output()
def plan_run(
    files: Sequence[Path | Mapping[str, Any]],
    overrides: Sequence[str],
    plugins: Sequence[str] = (),
    machine: Facts | None = None,
    lengths: Lengths | None = None,
    *,
    only_sampling: bool = False,
) -> RunPlan:
    """The plan of a run from configuration files, overrides and --plugin names; starts nothing.

    The plan is for this machine, or for one with the facts of `machine`. It assumes that the plugins installed here
    work there too.
    An error for a device that is too small names settings with which the plan is accepted, if there are any: the
    fastest, for prompts and responses of the mean lengths `lengths`. So does one for pools with too many devices.
    With `only_sampling` the plan has no rewards, for a conversation with the policy.
    Text that plugins print is shown without secrets and control characters, and plugins cannot close standard output.
    """
    hooks, loaded = configure(files, overrides, plugins, machine, elsewhere=machine is not None)
    facts = gather_facts(loaded.config, machine)

    def replan(further: Sequence[str]) -> RunPlan:
        others = configure(files, [*overrides, *further], plugins, machine, elsewhere=machine is not None)
        return make_plan(others[1], others[0], facts, only_sampling=only_sampling)

    try:
        return make_plan(loaded, hooks, facts, only_sampling=only_sampling)
    except PoolSizeError as error:
        raise with_layout_that_fits(error, replan) from error.__cause__
    except DeviceMemoryError as error:
        is_set = {key for key, origin in loaded.origins.items() if origin != "default"}
        chosen = {choice.key for choice in loaded.choices if not choice.set_by}
        known = lengths or Lengths()
        raise with_settings_that_fit(error, replan, loaded.config, is_set - chosen, facts, known) from error.__cause__


@foreign_output()
def plan_or_refuse(
    files: Sequence[Path | Mapping[str, Any]],
    overrides: Sequence[str],
    plugins: Sequence[str],
    machine: Facts,
    *,
    elsewhere: bool = True,
) -> RunPlan:
    """The same plan for the machine, whose refusal advises no settings: for one of many plans that are compared.

    `elsewhere`: it is not this machine, so libraries that are missing here do not count.
    """
    hooks, loaded = configure(files, overrides, plugins, machine, elsewhere=elsewhere)
    return make_plan(loaded, hooks, gather_facts(loaded.config, machine))
