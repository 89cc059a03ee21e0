"""Finds processes that have left their group and session, by a mark in their inherited environment."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "RLCORE_CHILD_OF"
"""Holds the mark of a killable child in its environment and in that of all that it starts."""
PATIENCE_S = 1.0
"""Seconds for which `end_strays` keeps looking: a killed process may just have started another."""


def marked(variable: str, mark: str) -> Iterator[Path]:
    """Entries of /proc of this user's processes, except for this one, that have the mark."""
    wanted = f"{variable}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield entry


class Strays:
    """Ends processes that a child leaves behind, which may keep open the pipes whose end signals the child's."""

    def __init__(self, pid: int, mark: str, serving: "asyncio.Task[None]", release: Callable[[], None]) -> None:
        """`serving` reads from the child until its pipes end; `release` ends that where a stray cannot be found."""
        self._mark, self._serving, self._release = mark, serving, release
        self._ending: asyncio.Task[None] | None = None
        pidfd, loop = os.pidfd_open(pid), asyncio.get_running_loop()

        def child_ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._ending = asyncio.create_task(self._end(), name=f"strays of process {pid}")

        loop.add_reader(pidfd, child_ended)

    @property
    def done(self) -> bool:
        """True when the child has ended and the search is over."""
        return self._ending is not None and self._ending.done()

    async def ended(self) -> None:
        """Wait for that. Several may wait, and one that is cancelled leaves the others waiting."""
        await asyncio.wait([self._serving])
        while self._ending is None:
            await asyncio.sleep(0)
        await asyncio.wait([self._ending])
        self._ending.result()

    async def _end(self) -> None:
        await asyncio.to_thread(end_strays, self._mark)
        done, _ = await asyncio.wait([self._serving], timeout=PATIENCE_S)
        if not done:
            self._release()


def end_strays(mark: str) -> None:
    """Kill processes with a child's mark; blocks until none is found."""
    patience = time.monotonic() + PATIENCE_S
    while found := list(marked(VARIABLE, mark)):
        for entry in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
        if time.monotonic() > patience:
            return
        time.sleep(0.01)
