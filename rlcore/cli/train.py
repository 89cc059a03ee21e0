"""`rlcore train`: trains, or prints the plan."""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlcore.cli.arguments import Parser, Settings, settings_of
from rlcore.cli.console import complain
from rlcore.errors import ConfigError, describe
from rlcore.imports import collecting_rarely

if TYPE_CHECKING:
    from rlcore.plan import RunPlan
    from rlcore.train import Start


def run(arguments: Sequence[str]) -> int:
    """Train; 0 if the run finished, 143 or 130 if a signal ended it cleanly."""
    parser = Parser("train", "Train with files and values. Everything is kept in <train.dir>/<train.name>.")
    parser.add_settings()
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue the run of this name from its newest checkpoint")
    start.add_argument(
        "--resume-from", type=Path, metavar="PATH", help="start a new run from a checkpoint, or from a run's newest one"
    )
    parser.add_argument(
        "--from-start", action="store_true", help="with --resume: start over if no checkpoint can be used"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the plan and stop")
    if {"-h", "--help"} & set(arguments):
        parser.add_keys_that_matter()
    parsed = parser.parse(arguments)
    settings = settings_of(parsed)
    if parsed.from_start and not parsed.resume:
        parser.error("--from-start: needs --resume")

    with contextlib.nullcontext() if parsed.dry_run else outliving_terminal():
        return _train(parsed, settings)


def _check_temporary_files() -> None:
    """ConfigError without a directory for temporary files, because torch could not be imported."""
    try:
        tempfile.gettempdir()
    except OSError as cause:
        raise ConfigError(f"train: {describe(cause)}; make room in one, or set TMPDIR") from cause


def _train(parsed: argparse.Namespace, settings: Settings) -> int:
    with collecting_rarely():
        from rlcore.plugins.planning import plan_run

        plan = plan_run(settings.files, settings.overrides, settings.plugins)
    if parsed.dry_run:
        if parsed.resume or parsed.resume_from or plan.config.train.name:  # else the run is a new one
            _check_start(plan, parsed)

        from rlcore.cli.plan import show_with_data
        from rlcore.cli.plan_on import estimates_here
        from rlcore.report.tracker_packages import require_trackers

        require_trackers(plan)
        show_with_data(plan, origins=False, found=estimates_here(plan, settings))
        return 0

    _note_slow_steps(plan)
    _check_temporary_files()

    with collecting_rarely():
        from rlcore.train import Start

    return train_planned(plan, Start(parsed.resume, parsed.from_start, parsed.resume_from))


def _check_start(plan: "RunPlan", parsed: argparse.Namespace) -> None:
    _check_temporary_files()

    from rlcore.train import Start
    from rlcore.train.start_check import check_start

    check_start(plan, Start(parsed.resume, parsed.from_start, parsed.resume_from))


def train_planned(plan: "RunPlan", start: "Start") -> int:
    """Train, and return the exit code. After a signal, end the process here once the run has ended cleanly."""
    from rlcore.train import Stopped, run_training

    try:
        run_training(plan, start)
    except Stopped as stopped:
        complain(f"rlcore: {stopped}")
        _leave(stopped.exit_code)
    return 0


@contextlib.contextmanager
def outliving_terminal() -> Iterator[None]:
    """Ignore SIGHUP inside the block, even before the run has a log that reports it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _note_slow_steps(plan: "RunPlan") -> None:
    from rlcore.plan.step_time import expected_step_time, slow_step_note

    if note := slow_step_note(plan, expected_step_time(plan, None)):
        complain(f"note: {note}")


def _leave(code: int) -> NoReturn:
    """End the process now: a worker's thread may be in an update, which cannot be interrupted."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
