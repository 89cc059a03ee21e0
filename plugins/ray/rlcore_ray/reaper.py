"""Ends what a driver leaves behind of a Ray that it started: `python -m rlcore_ray.reaper MARK`.

Ray's servers end with the driver, but the agents that they start notice only after a minute. This process holds a pipe
whose other end only the driver has. It waits for the pipe to close, then kills every process of that Ray: those with
the mark in their environment (some of Ray's overwrite it), and those that were started after this one and write to a
file in a session directory whose name has the driver's process id. Ray creates that directory before it starts a
process, so this also works for a driver that ends while Ray is starting.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlcore.cluster.kit import marked

VARIABLE = "RLCORE_RAY_OF"
"""Environment variable with the mark."""
PATIENCE_S = 5.0
"""Seconds for which it keeps looking for processes that are still being started."""
QUIET_S = 0.3
"""Seconds without a find after which it is done: a process may still be starting another."""
SESSION = re.compile(r"/session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}_(\d+)/")
"""Matches the directory of a session. Its time is not read, because a clock may be set back."""


class Reaper:
    """The reaper of every process started with the mark in its environment from now on."""

    def __init__(self, mark: str) -> None:
        command = [sys.executable, "-m", "rlcore_ray.reaper", mark]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def dismiss(self) -> None:
        """Have it end what is left, and then itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(2 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def belonging(mark: str, began: int, driver: int) -> Iterator[int]:
    """Processes of this user, except for driver and reaper, that have the mark, or write to a file of the session and
    were started at `began` or later."""
    yield from (int(entry.name) for entry in marked(VARIABLE, mark) if int(entry.name) != driver)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) in (os.getpid(), driver) or started(entry) < began:
                continue
            if _writes_to_session(entry, driver):
                yield int(entry.name)


def started(entry: Path) -> int:
    """The time at which a process was started, in ticks since the machine was; no clock that can be set."""
    return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[19])


def _writes_to_session(entry: Path, driver: int) -> bool:
    for link in (entry / "fd").iterdir():
        with contextlib.suppress(OSError):
            session = SESSION.search(os.readlink(link))
            if session and int(session[1]) == driver:
                flags = int((entry / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def main(mark: str) -> None:
    """Wait for the end of standard input, then kill until nothing has been found for QUIET_S seconds."""
    driver, began = os.getppid(), started(Path("/proc/self"))
    sys.stdin.read()
    ends_at = time.monotonic() + PATIENCE_S
    quiet_at = time.monotonic() + QUIET_S
    while time.monotonic() < min(quiet_at, ends_at):
        for process in belonging(mark, began, driver):
            quiet_at = time.monotonic() + QUIET_S
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
