"""`rlcore train`: the whole run, or its plan."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rlcore.cli.arguments import Parser, settings_of
from rlcore.cli.console import complain


def run(arguments: Sequence[str]) -> int:
    """Train; 0 when the run came to its end, 143 or 130 when a signal ended it in good order."""
    parser = Parser("train", "Train as files and values say. Everything is kept in <train.dir>/<train.name>.")
    parser.add_settings()
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume", action="store_true", help="continue the run of this name after its newest checkpoint"
    )
    start.add_argument(
        "--resume-from", type=Path, metavar="PATH", help="begin a separate run with a checkpoint, or a run's newest"
    )
    parser.add_argument(
        "--from-start", action="store_true", help="with --resume: begin with step 1 if no checkpoint can be used"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan and stop")
    parsed = parser.parse(arguments)
    settings = settings_of(parsed)
    if parsed.from_start and not parsed.resume:
        parser.error("--from-start: it goes with --resume")

    from rlcore.plugins.planning import plan_run

    plan = plan_run(settings.files, settings.overrides, settings.plugins)
    if parsed.dry_run:
        from rlcore.cli.plan import show

        show(plan, origins=False)
        return 0

    from rlcore.train import Start, Stopped, run_training

    try:
        run_training(plan, Start(parsed.resume, parsed.from_start, parsed.resume_from))
    except Stopped as stopped:
        complain(f"rlcore: {stopped}")
        _leave(stopped.exit_code)
    return 0


def _leave(code: int) -> NoReturn:
    """End the process now: a worker's thread may be in the middle of an update, which nothing can interrupt."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
