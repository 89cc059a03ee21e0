"""Finds the child processes, threads, file descriptors and asyncio tasks that a block leaves behind."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlcore.contracts.templates import template_child

OF_DRIVER = "/dev/nvidia"
"""Beginning of the paths of NVIDIA's driver, which keeps descriptors of a device until the process ends."""
PATIENCE_S = 3.0
"""Seconds within which ending threads and processes must be gone."""


class Leaked(AssertionError):
    """A block left something behind; the message names it."""


@dataclass(frozen=True)
class _Held:
    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    tasks: frozenset["asyncio.Task[object]"]

    def beyond(self, before: "_Held") -> list[str]:
        """Names of everything that is held now and was not held before."""
        found = [f"process {process}" for process in sorted(self.processes - before.processes)]
        found += [f"thread '{thread.name}'" for thread in self.threads - before.threads]
        found += [f"descriptor {number} ({where})" for number, where in sorted(self.descriptors - before.descriptors)]
        return found + [f"task '{task.get_name()}'" for task in self.tasks - before.tasks]


@contextmanager
def leaks() -> Iterator[None]:
    """Raise `Leaked`, naming everything that the block leaves behind.

    Looks at the descendants of this process, its threads, its open descriptors and, if a loop is running in this
    thread, the loop's tasks. The process that renders chat templates for this one is left out, and so are descriptors
    of NVIDIA's driver, which stay open after the first use of a device. Put it around
    `asyncio.run`, because a running loop may still hold resources that it frees later. Needs /proc (Linux).
    """
    before = _held()
    yield
    patience = time.monotonic() + PATIENCE_S
    while found := _held().beyond(before):
        if time.monotonic() > patience:
            raise Leaked(f"left behind: {', '.join(found)}")
        time.sleep(0.02)


def _held() -> _Held:
    try:
        tasks = frozenset(asyncio.all_tasks())
    except RuntimeError:  # no loop is running in this thread
        tasks = frozenset()
    threads = frozenset(thread for thread in threading.enumerate() if thread.is_alive())
    kept = template_child()  # there is one per process, and it outlives runs
    ours = {kept.pid} if kept else set()
    processes = descendants(os.getpid()) - ours if _has_children(ours) else set()
    pipes = {pipe.fileno() for pipe in (kept.stdin, kept.stdout) if pipe} if kept else set()
    descriptors = frozenset(
        (number, where) for number, where in _descriptors() if number not in pipes and not where.startswith(OF_DRIVER)
    )
    return _Held(frozenset(processes), threads, descriptors, tasks)


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            continue


def descendants(parent: int) -> set[int]:
    """Ids of the processes that `parent` and its descendants started and that have not been waited for."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(name))
    found: set[int] = set()
    waiting = list(children.get(parent, []))
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += children.get(pid, [])
    return found


def _has_children(besides: set[int]) -> bool:
    """False if this process has no other children than these.

    Reads one file per thread, because a walk through /proc takes milliseconds. True if the kernel does not keep these
    files, or if a thread has just ended.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb") as file:
                found |= set(map(int, file.read().split()))
        except OSError:
            return True
    return not found or not found <= besides


def is_running(process: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
