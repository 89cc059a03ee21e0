"""`rlcore resume`: continues a run with its own configuration."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.cli.arguments import Parser
from rlcore.cli.train import outliving_terminal, train_planned


def run(arguments: Sequence[str]) -> int:
    """Continue; 0 if the run finished, 143 or 130 if a signal ended it cleanly."""
    parser = Parser("resume", "Continue a run after its newest checkpoint, with the configuration in its directory.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that win over the run's configuration"
    )
    parser.add_argument("--from-start", action="store_true", help="start over if no checkpoint can be used")
    parsed = parser.parse(arguments)

    with outliving_terminal():
        from rlcore.plugins.saved_run import open_to_resume

        plan = open_to_resume(parsed.run).plan(parsed.overrides)

        from rlcore.train import Start

        return train_planned(plan, Start(True, parsed.from_start))
