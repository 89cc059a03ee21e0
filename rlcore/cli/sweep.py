"""`rlcore sweep`: trains over seeds and values, one run after another or several at a time, and compares them."""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rlcore.cli.arguments import Parser, Settings, settings_of
from rlcore.cli.console import answer, complain, outliving_reader, report
from rlcore.errors import ConfigError, PlanError, RlcoreError

if TYPE_CHECKING:
    from rlcore.plan import RunPlan
    from rlcore.runtime.machine_share import MachineShare
    from rlcore.train.sweeps import Cell, Sweep

FAILED = 2


def run(arguments: Sequence[str]) -> int:
    """Run the rest of the sweep and print the table; 2 if a run failed, 130 or 143 if a signal ended it."""
    parsed = _parser().parse(arguments)
    settings, jobs = settings_of(parsed), _jobs(parsed.jobs)

    from rlcore.cli.plan import show
    from rlcore.config import default_run_name, run_directory
    from rlcore.runtime.machine_share import shares_of_machine
    from rlcore.train.sweeps import Sweep, cells_of, parse_values

    cells: Sequence[Cell] = cells_of(_seeds(parsed.seeds, settings), [parse_values(text) for text in parsed.set])
    stem = default_run_name(settings.files, datetime.now(UTC)).rsplit("-", 2)[0]
    name = parsed.name or f"{stem}-sweep"
    for text in parsed.set:
        key, values = parse_values(text)
        if len(values) == 1 and values[0].startswith("["):
            complain(f"note: --set {text}: the list is one value; several are written {key}={values[0][1:-1]}")
    if jobs > len(cells):
        complain(f"note: --jobs {jobs}: the sweep has {len(cells)} runs")
    shares = shares_of_machine(min(jobs, len(cells)))
    cells, plan = _planned(settings, cells, f"train.name={name}", shares)
    shared = [*(str(file.absolute()) for file in settings.files), *settings.overrides]
    directory = run_directory(plan.config.train, (), datetime.now(UTC)).absolute()
    sweep = Sweep(directory, shared, cells, settings.plugins)
    if not parsed.json:
        with outliving_reader():
            show(plan, origins=False)
        at_once = f", {len(shares)} at a time" if len(shares) > 1 else ""
        report(f"\n{len(cells)} runs in {sweep.directory}{at_once}; the plan is that of {cells[0].name}")
        report("the output of a run is in NAME.out there")
    code = sweep.run(complain if parsed.json else report, shares)
    if code:
        num_done = sum(cell.state == "done" for cell in sweep.cells)
        complain(f"rlcore: sweep: interrupted with {num_done} of {len(cells)} runs done; the same command continues it")
        return code
    _show(sweep, sweep.metric(parsed.metric), parsed.json)
    failed = [cell for cell in sweep.cells if cell.state == "failed"]
    if failed:
        complain(
            f"rlcore: sweep: {len(failed)} of {len(cells)} runs failed, first {failed[0].name}: {failed[0].error}; the "
            "same command tries them again"
        )
    return FAILED if failed else 0


def _parser() -> Parser:
    parser = Parser(
        "sweep",
        "Train once for each seed and each combination of values. Runs are in <train.dir>/NAME; the same command "
        "continues the sweep.",
    )
    parser.add_settings()
    parser.add_argument(
        "--seeds", default="", metavar="0..4", help="seeds, as 0..4 or 0,3,7; default: train.seed of the configuration"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=A,B", help="a key and its values; may be repeated"
    )
    parser.add_argument("--name", default="", help="name of the sweep; default: the configuration's stem, with -sweep")
    parser.add_argument(
        "--metric", default="", help="metric of the table; default: the mean of the first held-out source"
    )
    parser.add_argument(
        "--jobs", default="1", metavar="N", help="runs at a time, which share cores and GPUs; default 1"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


def _seeds(text: str, settings: Settings) -> tuple[int, ...]:
    """Those of --seeds; without it, the seed that a single run with these settings has."""
    from rlcore.config.layers import leaves, read_layers
    from rlcore.train.sweeps import parse_seeds

    if text:
        return parse_seeds(text)
    seed: object = 0
    for layer in read_layers(settings.files, settings.overrides):
        seed = dict(leaves(layer.values)).get("train.seed", seed)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"train.seed: found {seed!r}; needs a number in a sweep, or seeds of --seeds")
    return (seed,)


def _jobs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--jobs: found '{text}'; needs the number of runs at a time: 1 or more")
    return int(text)


def _planned(
    settings: Settings, cells: "Sequence[Cell]", name: str, shares: "Sequence[MachineShare]"
) -> "tuple[list[Cell], RunPlan]":
    """The cells, without the plugins that their plans do not use, and the plan of the first.

    Every combination of values is planned before a run begins. A plugin that no combination uses is refused as it is in
    a single run.
    """
    from rlcore.plan.planner import UnusedPluginsError

    plans: list[RunPlan] = []
    unused: list[UnusedPluginsError] = []
    found: list[Cell] = []
    for values, members in itertools.groupby(cells, key=lambda cell: cell.group):
        group = list(members)
        with _naming(values if plans else ""):
            try:
                plan = _plan(settings, group[0], name, shares)
            except UnusedPluginsError as error:
                unused.append(error)
                group = [_without(cell, error.plugins, settings) for cell in group]
                plan = _plan(settings, group[0], name, shares)
        plans.append(plan)
        found += group
    if len(unused) == len(plans) and set.intersection(*(set(error.plugins) for error in unused)):
        raise unused[0]
    return found, plans[0]


@contextmanager
def _naming(values: str) -> Iterator[None]:
    """Errors begin with the values; not those of the first combination, which may have any cause."""
    try:
        yield
    except RlcoreError as error:
        if not values:
            raise
        raise ConfigError(f"--set {values}: {error}") from error


def _without(cell: "Cell", plugins: Sequence[str], settings: Settings) -> "Cell":
    """The cell with these plugins left out, wherever they are enabled."""
    from rlcore.config import enabled_plugins
    from rlcore.plugins.enabled import name_of

    sections = enabled_plugins(settings.files, [*settings.overrides, *cell.overrides])
    keys = [f"plugins.{name}=false" for name in plugins if name in sections]
    return replace(
        cell,
        overrides=(*cell.overrides, *keys),
        left_out=tuple(plugin for plugin in settings.plugins if name_of(plugin) in plugins),
    )


def _plan(settings: Settings, cell: "Cell", name: str, shares: "Sequence[MachineShare]") -> "RunPlan":
    """The plan of the cell on the first share; ConfigError if that many runs do not fit on the machine."""
    from rlcore.plan.memory_limits import check_memory
    from rlcore.plugins.planning import plan_run

    plugins = [plugin for plugin in settings.plugins if plugin not in cell.left_out]
    with shares[0].confined():
        plan = plan_run(settings.files, [*settings.overrides, *cell.overrides, name], plugins)
    num_gpus = sum(1 for share in shares if share.gpus)
    if plan.config.cluster.device == "cuda" and 0 < num_gpus < len(shares):
        raise ConfigError(
            f"--jobs: found {len(shares)}, this machine has {num_gpus} GPUs; needs a GPU for each run: --jobs "
            f"{num_gpus}, or cluster.device=cpu"
        )
    if plan.facts.memory_bytes is not None and len(shares) > 1 and not plan.cluster.abilities.elsewhere:
        facts = replace(plan.facts, memory_bytes=plan.facts.memory_bytes // len(shares))
        try:
            check_memory(plan.config, plan.workers, plan.memory_bytes, facts)
        except PlanError as error:
            raise ConfigError(f"--jobs: found {len(shares)}, each with its part of the memory: {error}") from error
    return plan


def _show(sweep: "Sweep", metric: str, as_json: bool) -> None:
    from rlcore.cli.console import stdout, table

    groups = sweep.groups(metric)
    if as_json:
        rows = [
            {"values": group.name, "runs": group.values, "failed": group.num_failed}
            | ({"mean": group.mean, "min": min(group.values), "max": max(group.values)} if group.values else {})
            for group in groups
        ]
        answer(json.dumps({"metric": metric, "groups": rows}, indent=1))
        return
    lines = [
        (
            group.name,
            len(group.values),
            group.num_failed,
            f"{group.mean:.4g}" if group.values else "-",
            f"{group.spread:.2g}" if len(group.values) > 1 else "-",
            f"{min(group.values):.4g} .. {max(group.values):.4g}" if group.values else "-",
        )
        for group in groups
    ]
    columns = ("values", "runs", "failed", "mean", "std", "min .. max")
    stdout().print(table(metric, columns, lines))
