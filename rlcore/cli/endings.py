"""Prevents called code from ending the command's process silently: `os._exit(0)` would look like success."""

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlcore.cli.console import complain
from rlcore.errors import EndOfProcess, shown

_ENDS = ("_exit", "execv", "execve")
"""Functions of `os` that end the process; its other `exec` functions call these."""
_OURS = "rlcore."


class Endings:
    """Replaces the functions of `os` that end this process.

    Below a frame of rlcore the replacements raise `EndOfProcess`, which the boundary there turns into its error. In a
    thread that rlcore did not start, nothing would catch it: there they print the caller, and end the process with a
    code other than 0. rlcore itself and forked children get the functions of the system.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code of the command; None before it is known."""
        self._pid = os.getpid()
        self._exit = os._exit

    def install(self) -> None:
        """Replace the functions, in `os` and in the module that `os` imports them from."""
        source = sys.modules[os._exit.__module__]
        for name in _ENDS:
            replaced = self._refusing(name, getattr(os, name))
            setattr(os, name, replaced)
            setattr(source, name, replaced)

    def _refusing(self, name: str, end: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*arguments: Any) -> Any:
            caller = sys._getframe().f_back
            if os.getpid() != self._pid or _is_ours(caller):
                return end(*arguments)
            call = f"os.{name}({', '.join(map(shown, arguments))})"
            if _is_below_ours(caller):
                raise EndOfProcess(call)
            if self.code is None:
                complain(f"rlcore: thread '{threading.current_thread().name}'{_where(caller)} called {call}")
            exit_code = arguments[0] if name == "_exit" else 0
            return self._exit(self.code or exit_code % 256 or int(self.code is None))

        return refuse


def refuse_early_ends() -> Endings:
    """Replace the functions in this process."""
    endings = Endings()
    endings.install()
    return endings


def _is_below_ours(frame: FrameType | None) -> bool:
    while frame is not None and not _is_ours(frame):
        frame = frame.f_back
    return frame is not None


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(_OURS)


def _where(caller: FrameType | None) -> str:
    return f", at {caller.f_code.co_filename}:{caller.f_lineno}," if caller else ""
