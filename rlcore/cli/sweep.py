"""`rlcore sweep`: runs over seeds and values, one after another, and their table."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rlcore.cli.arguments import Parser, settings_of
from rlcore.cli.console import answer, complain

if TYPE_CHECKING:
    from rlcore.train.sweeps import Sweep

FAILED = 2


def run(arguments: Sequence[str]) -> int:
    """Run what is left of the sweep and print the table; 2 when a run failed, 130 or 143 when a signal ended it."""
    parser = Parser(
        "sweep",
        "Train once for each seed and each combination of values. Runs stand in <train.dir>/NAME; the same command "
        "continues the sweep.",
    )
    parser.add_settings()
    parser.add_argument("--seeds", default="0", metavar="0..4", help="seeds, as 0..4 or 0,3,7; default 0")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=A,B", help="a key and its values; may repeat"
    )
    parser.add_argument("--name", default="", help="of the sweep; default: the configuration's stem, with -sweep")
    parser.add_argument("--metric", default="", help="of the table; default: the mean of the first held-out source")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parsed = parser.parse(arguments)
    settings = settings_of(parsed)

    from rlcore.cli.plan import show
    from rlcore.config import default_run_name, run_directory
    from rlcore.plugins.planning import plan_run
    from rlcore.train.sweeps import Sweep, cells_of, parse_seeds, parse_values

    cells = cells_of(parse_seeds(parsed.seeds), [parse_values(text) for text in parsed.set])
    stem = default_run_name(settings.files, datetime.now(UTC)).rsplit("-", 2)[0]
    name = parsed.name or f"{stem}-sweep"
    plan = plan_run(settings.files, [*settings.overrides, *cells[0].overrides, f"train.name={name}"], settings.plugins)
    plugins = [word for plugin in settings.plugins for word in ("--plugin", plugin)]
    shared = [*(str(file.absolute()) for file in settings.files), *settings.overrides, *plugins]
    sweep = Sweep(run_directory(plan.config.train, (), datetime.now(UTC)).absolute(), shared, cells)
    if not parsed.json:
        show(plan, origins=False)
        answer(f"\n{len(cells)} runs in {sweep.directory}; the plan is that of {cells[0].name}")
    code = sweep.run(complain if parsed.json else answer)
    if code:
        complain("rlcore: sweep: interrupted; the same command goes on with it")
        return code
    _show(sweep, parsed.metric or sweep.metric(), parsed.json)
    failed = [cell for cell in sweep.cells if cell.state == "failed"]
    if failed:
        complain(
            f"rlcore: sweep: {len(failed)} of {len(cells)} runs failed, first {failed[0].name}: {failed[0].error}; the "
            "same command tries them again"
        )
    return FAILED if failed else 0


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
            f"{group.mean:.4g}",
            f"{group.spread:.2g}",
            f"{min(group.values):.4g} .. {max(group.values):.4g}" if group.values else "-",
        )
        for group in groups
    ]
    columns = ("values", "runs", "failed", "mean", "std", "min .. max")
    stdout().print(table(metric, columns, lines))
