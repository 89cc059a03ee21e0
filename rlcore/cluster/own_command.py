"""Runs rlcore commands in separate processes, and waits for them across signals."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType, TracebackType
from typing import Self


class OwnCommands:
    """Runs `rlcore` commands side by side, each in a process, its output appended to a file. Main thread only.

    SIGINT and SIGTERM are passed on to the commands, which end cleanly. A terminal's Ctrl-C also reaches them itself;
    a run takes two signals in quick succession as one. SIGHUP is ignored: the commands outlive a closed terminal, so
    the process that starts the next ones has to.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The first signal that was received."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        # `put` of a SimpleQueue may interrupt `get` in the same thread, as a signal's handler does.
        self._events: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._receive)
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the commands that have not ended."""
        return tuple(self._children)

    def start(self, name: str, arguments: Sequence[str], output: Path) -> None:
        """Start `rlcore ARGUMENTS` under a name that no running command has."""
        with output.open("ab") as file:
            command = [sys.executable, "-m", "rlcore", *arguments]
            child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        self._children[name] = child
        Thread(target=lambda: self._events.put((name, child.wait())), daemon=True).start()
        if self.signum is not None:  # it arrived while the child was started
            child.send_signal(self.signum)

    def next_end(self) -> tuple[str, int] | None:
        """The next command that ends and its exit code, 128 + n if signal n killed it; None when a signal arrived."""
        event = self._events.get()
        if event is None:
            return None
        name, returned = event
        del self._children[name]
        return name, 128 - returned if returned < 0 else returned

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        for child in tuple(self._children.values()):
            child.send_signal(signum)
        self._events.put(None)
