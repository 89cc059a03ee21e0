"""`rlcore eval`: held-out prompts, without training."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli.arguments import Parser, settings_of
from rlcore.cli.console import answer


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print the metrics."""
    parser = Parser("eval", "Evaluate the configured model, or a checkpoint, on the prompts of eval.sources.")
    parser.add_settings()
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="a run, or one of its checkpoints/step_N")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse(arguments)
    settings = settings_of(parsed)

    from rlcore.cli.console import stdout, table
    from rlcore.plugins.planning import plan_run

    plan = plan_run(settings.files, settings.overrides, settings.plugins)

    from rlcore.train import run_evaluation

    metrics = run_evaluation(plan, parsed.checkpoint)
    if parsed.json:
        answer(json.dumps(metrics, indent=1))
    else:
        rows = [(name, f"{value:.4g}") for name, value in sorted(metrics.items())]
        stdout().print(table("evaluation", ("metric", "value"), rows))
    return 0
