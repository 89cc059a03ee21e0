"""Reports a run's status: keeps status.json up to date, and answers SIGUSR1 in log.txt and on the terminal."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlcore.contracts.activity import Activity, as_current
from rlcore.errors import RlcoreError, describe
from rlcore.report.standing import sentence
from rlcore.report.status import FAILED, FINISHED, STOPPED, Status, StatusWriter
from rlcore.report.terminal import Terminal
from rlcore.train.signals import Stopped

logger = logging.getLogger(__name__)


@contextmanager
def observed(run_dir: Path, activity: Activity, terminal: Terminal) -> Iterator[None]:
    """Context in which the activity is the current one and is reported; the way it ends is the run's last status."""
    writer = StatusWriter(run_dir, activity, terminal.standing)

    def answer(status: Status) -> None:
        text = sentence(status, time.time())
        logger.info("%s", text)
        terminal.say(text)

    came_to_its_end = False
    with as_current(activity):
        try:
            with writer.running(), _answering(writer, answer):
                yield
            came_to_its_end = True
        finally:
            error = None if came_to_its_end else sys.exception()
            if error is None:
                writer.end(FINISHED)
            else:
                writer.end(STOPPED if isinstance(error, Stopped) else FAILED, _problem(error))


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, (RlcoreError, Stopped)) else describe(error)


@contextmanager
def _answering(writer: StatusWriter, answer: Callable[[Status], None]) -> Iterator[None]:
    """Context in which SIGUSR1 triggers a report; without effect outside the main thread, which alone handles
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: writer.ask(answer))  # also while the loop is blocked
    try:
        yield
    finally:
        if before is not None:  # one of C code cannot be set again, and the default would end the process
            signal.signal(signal.SIGUSR1, before)
