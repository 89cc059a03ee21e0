"""`rlcore eval`: evaluates on held-out prompts, without training."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli.arguments import Parser, Settings, settings_of
from rlcore.cli.console import answer

if TYPE_CHECKING:
    from rlcore.plan import RunPlan


def run(arguments: Sequence[str]) -> int:
    """Evaluate and print the metrics."""
    parser = Parser(
        "eval",
        "Evaluate the configured model, or a checkpoint, on the prompts of eval.sources, and keep "
        "the samples. With only --checkpoint, or a directory in its place, the configuration is that of its run.",
    )
    parser.add_settings()
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="a run, or one of its checkpoints/step_N")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="write the samples to this file; default: evaluations/ of the run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse(arguments)
    settings = settings_of(parsed)
    if parsed.checkpoint is None and len(settings.files) == 1 and settings.files[0].is_dir():
        parsed.checkpoint, settings = settings.files[0], replace(settings, files=())

    from rlcore.cli.console import stdout, table
    from rlcore.train import find_checkpoint, run_evaluation
    from rlcore.train.api import samples_path

    plan = _plan(settings, parsed.checkpoint)
    weights = None if parsed.checkpoint is None else find_checkpoint(parsed.checkpoint)
    samples = parsed.samples or samples_path(plan, weights)
    metrics = run_evaluation(plan, weights, samples)
    if parsed.json:
        answer(json.dumps({**metrics, "samples": str(samples)}, indent=1))
    else:
        rows = [(name, f"{value:.4g}") for name, value in sorted(metrics.items())]
        stdout().print(table("evaluation", ("metric", "value"), rows))
        answer(f"samples: {samples}")
    return 0


def _plan(settings: Settings, weights: Path | None) -> "RunPlan":
    """The plan of the named files; of the run's configuration if only a checkpoint is named."""
    from rlcore.plugins.planning import plan_run
    from rlcore.plugins.saved_run import open_run

    if weights is not None and not settings.files:
        return open_run(weights).plan(settings.overrides, settings.plugins)
    return plan_run(settings.files, settings.overrides, settings.plugins)
