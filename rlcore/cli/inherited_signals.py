"""Signals of the command's process, as its parent left them and as a run needs them."""

import signal
from types import FrameType


def mend_inherited_signals() -> None:
    """SIGCHLD is not ignored, or the exit codes of children would be lost; SIGUSR1 ends nothing where no run answers.

    None is blocked: children inherit that, and then neither they nor a run can be ended.
    SIGUSR1 gets a handler that does nothing, because programs that a command starts would inherit that it is ignored.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _unanswered)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _unanswered(signum: int, frame: FrameType | None) -> None:
    """Nothing is under way that could be asked for."""
