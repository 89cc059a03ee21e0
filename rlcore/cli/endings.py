"""Keeps code that a command calls from ending its process in silence: `os._exit(0)` would pass for success."""

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlcore.cli.console import complain
from rlcore.errors import EndOfProcess, shown

_ENDS = ("_exit", "execv", "execve")
"""Functions of `os`; its other `exec` functions call these."""
_OURS = "rlcore."


class Endings:
    """The functions of `os` that end this process, replaced.

    Below a frame of rlcore they raise `EndOfProcess`, which the boundary there turns into its error. In a thread that
    rlcore did not start nothing would catch that: there they say who called, and end the process with a code that is
    not 0. rlcore itself and forked children get the functions of the system.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code of the command; None before it is known."""
        self._pid = os.getpid()
        self._exit = os._exit

    def install(self) -> None:
        """Replace them, in `os` and in the module that `os` has them from."""
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
    """The endings of this process, installed."""
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
