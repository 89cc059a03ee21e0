"""Stands between a killable child and its parent, and ends with the child everything that the child started.

A process can leave its group and its session and empty its environment, but not its ancestors: the keeper is a
subreaper (prctl(2)), so a process whose parent has ended becomes the keeper's child. The keeper ends
after all of its descendants, or PATIENCE_S after the child if some cannot be killed.
"""

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE_S = 1.0
POLL_S = 0.005
AWAITED = (signal.SIGTERM, signal.SIGCHLD)


def fork_below_keeper(parent: int, theirs: Sequence[int]) -> int:
    """Return in a new process, with the keeper's id; the present process becomes its keeper and does not return.

    The keeper closes the descriptors `theirs`, ends when `parent` does or sends SIGTERM, and ends as the child did. It
    ignores the signals of others, such as the child's.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, children vanish unseen
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper, child = os.getpid(), os.fork()
    if child != 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        _keep(parent, child, theirs)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return keeper


def _keep(parent: int, child: int, theirs: Sequence[int]) -> NoReturn:
    null = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        os.dup2(null, output)
    for descriptor in theirs:
        os.close(descriptor)
    ended: dict[int, int] = {}
    while child not in ended and os.getppid() == parent:
        arrived = signal.sigwaitinfo(AWAITED)
        if arrived.si_signo == signal.SIGTERM and arrived.si_pid == parent:
            break
        _reap(ended)
    patience = time.monotonic() + PATIENCE_S
    while _reap(ended) and time.monotonic() < patience:
        for process in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_S)
    _end_as(ended.get(child, signal.SIGKILL))


def _reap(ended: dict[int, int]) -> bool:
    """Wait for what has ended and keep its status; False if there is nothing left to wait for."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
        return True
    return False


def _end_as(status: int) -> NoReturn:
    """End with the exit code, or by the signal, that a process's status names."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # of SIGKILL
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def descendants(ancestor: int) -> set[int]:
    """Ids of the processes below another."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = list(children.get(ancestor, ()))
    while waiting:
        process = waiting.pop()
        found.add(process)
        waiting += children.get(process, ())
    return found
