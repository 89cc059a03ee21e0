"""Finds where a process hangs, from the output of Python's faulthandler."""

import re
import sysconfig

from rlcore.cluster.child_main import __file__ as OURS

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
THREAD = re.compile(r"(Current t|T)hread 0x")
LIBRARY = sysconfig.get_paths()["stdlib"]
SITE = sysconfig.get_paths()["purelib"]
MAX_FRAMES = 200


class StackDump:
    """The frames of the main thread in the last dump, the innermost first."""

    def __init__(self) -> None:
        self._thread: list[tuple[str, str, str]] = []
        """The thread that is being read: file, line and function of each frame."""
        self._main: list[tuple[str, str, str]] = []

    def add(self, line: str) -> None:
        """Add a line of the process's output, whether of a dump or not."""
        if THREAD.match(line):
            self._thread = []
        elif (frame := FRAME.match(line)) is not None and len(self._thread) < MAX_FRAMES:
            self._thread.append((frame[1], frame[2], frame[3]))
            if frame[1] == OURS and frame[3] == "main":
                self._main = self._thread

    @property
    def where(self) -> str:
        """The tail of an error, '; now at file.py:3 in f'; empty without a dump.

        Uses the innermost frame outside Python's standard library, if there is one.
        """
        theirs = [frame for frame in self._main if not of_python(frame[0])]
        frames = [frame for frame in theirs if frame[0] != OURS] or self._main
        if not frames:
            return ""
        file, line, function = frames[0]
        return f"; now at {file}:{line} in {function}"


def of_python(file: str) -> bool:
    """True for a file of Python's standard library."""
    return file.startswith("<") or (file.startswith(LIBRARY) and not file.startswith(SITE))
