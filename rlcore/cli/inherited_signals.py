"""Changes signals that the command's process inherits in a state that a run cannot use."""

import signal
from types import FrameType


def reset_inherited_signals() -> None:
    """Stop ignoring SIGCHLD, which would lose the exit codes of children, and let SIGUSR1 end no process without a run.

    No signal stays blocked: children inherit the mask, and then neither they nor a run can be ended.
    SIGUSR1 gets a handler that does nothing: programs that a command starts would inherit an ignored signal.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _unanswered)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _unanswered(signum: int, frame: FrameType | None) -> None:
    """Do nothing: no run can answer."""
