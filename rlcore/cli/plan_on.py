"""Seconds, memory and helpful settings of a plan: for another machine with `--on 8xH100-80GB`, and for this one if its
cards are known."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.cli.arguments import Parser, Settings
from rlcore.cli.console import answer

if TYPE_CHECKING:
    from rich.table import Table

    from rlcore.plan import RunPlan
    from rlcore.plan.machine_plan import Lengths, MachinePlan

GIB = 2**30


def add_machine(parser: Parser) -> None:
    """Accept --on and the lengths that its estimates depend on."""
    parser.add_argument("--on", metavar="MACHINE", default="", help="plan for other GPUs: 8xH100-80GB, 2x8xH100-80GB")
    lengths = (("--prompt-tokens", "prompt"), ("--response-tokens", "response"))
    for option, what in lengths:
        parser.add_argument(
            option,
            type=_length,
            metavar="N",
            default=0,
            help=f"mean tokens of a {what}, for estimated seconds; default: half of the limit",
        )


def _length(text: str) -> int:
    """The number of an option; argparse names the option in the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found '{text}'; needs a number of tokens, 1 or more")
    return int(text)


def lengths_of(parsed: argparse.Namespace) -> "Lengths":
    """The lengths of the command line."""
    from rlcore.plan.machine_plan import Lengths

    return Lengths(parsed.prompt_tokens, parsed.response_tokens)


def run_on(parsed: argparse.Namespace, settings: Settings, show: Callable[["RunPlan", bool], None]) -> int:
    """Plan for the machine; print the plan with `show`, and the estimates."""
    from rlcore.plan.machine_cards import facts_of, machine_of
    from rlcore.plan.machine_plan import plan_on
    from rlcore.plugins.planning import plan_or_refuse, plan_run

    machine, lengths = machine_of(parsed.on), lengths_of(parsed)
    facts = facts_of(machine)

    def replan(overrides: Sequence[str]) -> "RunPlan":
        if not overrides:  # only the error for the run itself is read
            return plan_run(settings.files, settings.overrides, settings.plugins, facts, lengths)
        return plan_or_refuse(settings.files, [*settings.overrides, *overrides], settings.plugins, facts)

    plan, found = plan_on(replan, machine, lengths)
    if parsed.json:
        answer(json.dumps(to_json(plan, found), indent=1))
    else:
        show(plan, parsed.origins)
        show_estimates(plan, found)
    return 0


def estimates_here(plan: "RunPlan", settings: Settings, lengths: "Lengths | None" = None) -> "MachinePlan | None":
    """The estimates of a plan for this machine; None if its cards are not known ones of one kind, or the plan uses no
    GPU of it."""
    from rlcore.plan.machine_plan import Lengths, own_machine, plan_on
    from rlcore.plugins.planning import plan_or_refuse

    machine = own_machine(plan)
    if machine is None:
        return None

    def replan(overrides: Sequence[str]) -> "RunPlan":
        if not overrides:
            return plan
        changed = [*settings.overrides, *overrides]
        return plan_or_refuse(settings.files, changed, settings.plugins, plan.facts, elsewhere=False)

    return plan_on(replan, machine, lengths or Lengths())[1]


def to_json(plan: "RunPlan", found: "MachinePlan") -> dict[str, Any]:
    """Plan and estimates as JSON values, in seconds and bytes."""
    from rlcore.plan import plan_to_json
    from rlcore.plan.machine_assumptions import assumptions

    estimates = {
        "machine": str(found.machine),
        "step_s": found.times.total,
        "phases": {
            name: {"seconds": seconds, "bound": found.times.bound[name]}
            for name, seconds in found.times.seconds.items()
        },
        "memory": {pool: dict(phases) for pool, phases in found.memory.items()},
        "host_memory": {role: dict(sizes) for role, sizes in found.host.items()},
        "settings": [{"overrides": list(setting.overrides), "step_s": setting.step_s} for setting in found.settings],
        "assumptions": [*_lengths(found), *assumptions(found.machine)],
    }
    return plan_to_json(plan) | {"on": estimates}


def show_estimates(plan: "RunPlan", found: "MachinePlan") -> None:
    """Print the estimates as tables, with their assumptions."""
    from rlcore.cli.console import say, stdout
    from rlcore.plan.catalog import remedy
    from rlcore.plan.faster_layouts import WORTH
    from rlcore.plan.machine_assumptions import assumptions
    from rlcore.plan.step_time import in_words

    console = stdout()
    console.print()
    for table in _tables(plan, found):
        console.print(table)
        console.print()
    if not found.settings:
        say(
            console,
            f"no setting that was tried saves more than {WORTH:.0%} of a step: layouts, weight sync, rows, memory",
        )
    for line in (*_lengths(found), *assumptions(found.machine)):
        say(console, f"assumed: {line}")
    if found.machine.nodes > 1 and not plan.cluster.abilities.elsewhere:
        say(console, f"note: {found.machine.nodes} nodes need a cluster of several: {remedy('cluster.backend')}")
    tokens = found.size.groups * found.size.samples * found.size.response
    times = found.times
    duration = f"{times.total:.0f} s" if times.total >= 1 else in_words(times.total)
    say(
        console,
        f"a step takes about {duration} on {found.machine} ({tokens / times.total:,.0f} sampled tokens/s); "
        f"{times.longest} takes most of it, bound by {times.bound[times.longest]}",
    )


def _tables(plan: "RunPlan", found: "MachinePlan") -> "Iterator[Table]":
    from rlcore.cli.console import table
    from rlcore.plan.device_memory import PHASES

    times = found.times
    everything = sum(times.seconds.values())
    yield table(
        f"seconds of a step on {found.machine}",
        ("phase", "seconds", "share", "bound by"),
        (
            (name, _seconds(seconds), f"{seconds / everything:.0%}", times.bound[name])
            for name, seconds in times.seconds.items()
        ),
    )
    size = (plan.facts.gpu_memory_bytes or 0) / GIB
    yield table(
        f"memory of a device in GiB, of {size:.1f}",
        ("pool", *PHASES),
        ((pool, *(f"{phases[name] / GIB:.1f}" for name in PHASES)) for pool, phases in found.memory.items()),
    )
    yield table(
        "host memory of all ranks in GiB",
        ("role", "for", "GiB"),
        ((role, purpose, f"{size / GIB:.1f}") for role, sizes in found.host.items() for purpose, size in sizes.items()),
    )
    if found.settings:
        yield _settings_table(found)


def _seconds(seconds: float) -> str:
    return "< 0.1" if 0 < seconds < 0.1 else f"{seconds:.1f}"


def _settings_table(found: "MachinePlan") -> "Table":
    from rlcore.cli.console import table

    return table(
        "settings that would help most",
        ("settings", "seconds of a step", "saved"),
        (
            (" ".join(setting.overrides), _seconds(setting.step_s), f"{1 - setting.step_s / found.times.total:.0%}")
            for setting in found.settings
        ),
    )


def _lengths(found: "MachinePlan") -> list[str]:
    size = found.size
    return [
        f"prompts have {size.prompt} tokens on average and responses {size.response} (--prompt-tokens, "
        f"--response-tokens), the longest {size.longest}"
    ]
