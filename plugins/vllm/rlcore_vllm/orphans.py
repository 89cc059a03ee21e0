"""Ends a process with the one that started it, whatever it does."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, or now if it has ended.

    What a fork has of its parent's event loop is dropped, too: signals to this process would stop the parent.
    """
    signal.set_wakeup_fd(-1)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
