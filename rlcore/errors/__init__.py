"""The errors of rlcore: each is one line that says who, what was found, what is needed and what can be chosen.

There are four mechanisms:

* A wrong configuration, plugin, combination or checkpoint raises the matching `RlcoreError`, if possible before
  anything starts. The command line prints its one line and exits with 2.
* A reward or tool that fails is data (`Reward(status=FAILED)`), never an exception in the training loop.
* Foreign code runs inside `boundary()`, which names its owner in errors.
* A bug in rlcore raises Python's exception, with its traceback.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from opcode import opmap
from traceback import TracebackException
from types import TracebackType
from typing import Any

from rlcore.errors.redaction import LONGEST_TEXT, beginning
from rlcore.errors.user_lines import line_of


class RlcoreError(Exception):
    """An error that a user, plugin author or operator can fix; `str()` is the one line to print."""

    role: str = ""
    """Role of the worker whose call raised the error; `role`, `method` and `offered_by` are empty for other errors."""
    method: str = ""
    offered_by: str = ""
    """The worker's class and the plugin that offers it, "Judge of plugin 'x' (x 1.0)"; empty until that is known."""


class ConfigError(RlcoreError):
    """The user's configuration is wrong."""


class PluginError(RlcoreError):
    """A plugin breaks its contract; the plugin's author can fix it."""


class OfferError(PluginError):
    """An offer or request holds wrong data; the boundary around the plugin's code adds the plugin's name."""


class PlanError(RlcoreError):
    """Parts that are valid one by one do not fit together."""


class RewardError(RlcoreError):
    """Rewards failed beyond what the run's failure policy allows."""


class WorkerError(RlcoreError):
    """A worker failed or died; names its role and replica, and has role, method and offering plugin as attributes."""


class CheckpointError(RlcoreError):
    """A checkpoint is missing, incomplete, damaged or of another run."""


class EndOfProcess(SystemExit):
    """Foreign code tried to end the process by `os._exit` or `os.execv`; the call is refused, the process continues."""

    def __init__(self, call: str) -> None:
        super().__init__(1)
        self.call = call
        """The call as errors show it: 'os._exit(0)'."""


@contextmanager
def worker_call(role: str, method: str, offered_by: str = "") -> Iterator[None]:
    """Add the role, method and offering plugin of a worker's call to the errors that leave the block.

    An error that already has a role keeps it.
    """
    try:
        yield
    except RlcoreError as error:
        if not error.role:
            error.role, error.method = role, method
        if error.role == role:
            error.offered_by = error.offered_by or offered_by
        raise


ANSWERED = (Exception, SystemExit)
"""Exceptions of foreign code that a boundary turns into an error.

A boundary also turns other exceptions that the foreign code itself raised. It passes on a Ctrl-C, the cancellation of
the task, and the end of a generator that waits inside the boundary.
"""
CALLED = (*ANSWERED, GeneratorExit)
"""The exceptions to catch around a call that ends before the boundary does, so that no generator waits in it."""


def boundary(
    whose: str, error: type[RlcoreError], caught: type[BaseException] | tuple[type[BaseException], ...] = ANSWERED
) -> "Boundary":
    """Run foreign code: its exceptions become `error`, which names the code by `whose`.

    A PluginError or WorkerError ends with the line of user code that raised the exception.

    An RlcoreError passes unchanged. An OfferError, which does not name its owner, becomes a PluginError with the name.
    The original exception stays chained as the cause. Pass BaseException as `caught` where no caller above handles
    exits and cancellations: in a process that only runs this code.
    """
    return Boundary(whose, error, caught)


class Boundary:
    """The context manager that `boundary` returns."""

    __slots__ = ("_caught", "_error", "_whose")

    def __init__(
        self, whose: str, error: type[RlcoreError], caught: type[BaseException] | tuple[type[BaseException], ...]
    ) -> None:
        self._whose, self._error, self._caught = whose, error, caught

    def __enter__(self) -> None:
        """Enter the foreign code."""

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the foreign code, and turn its exception into the error."""
        if isinstance(cause, OfferError):
            raise PluginError(f"{self._whose}: {cause}") from cause
        if cause is None or isinstance(cause, RlcoreError):
            return
        if isinstance(cause, self._caught) or (self._caught is not Exception and _is_theirs(cause)):
            text = describe(cause)
            if text == "CancelledError" and _running_task() is not None:
                text += ": something that it awaited was cancelled"
            place = place_of(cause) if issubclass(self._error, PluginError | WorkerError) else ""
            raise self._error(f"{self._whose}: {text}{place}") from cause


def _is_theirs(cause: BaseException) -> bool:
    """True if the foreign code raised the BaseException, not a signal, a cancellation or the end of a generator."""
    if isinstance(cause, (Exception, SystemExit)):
        return False
    if isinstance(cause, (KeyboardInterrupt, GeneratorExit)):
        return _is_raised(cause)
    if type(cause).__name__ == "CancelledError" and type(cause).__module__ == "asyncio.exceptions":
        task = _running_task()
        return task is None or task.cancelling() == 0
    return True


def _is_raised(cause: BaseException) -> bool:
    """True if a `raise` statement outside of asyncio raised it; a signal or `aclose()` interrupts others."""
    trace = cause.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or str(trace.tb_frame.f_globals.get("__name__")).startswith("asyncio."):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]


def _running_task() -> Any:
    """The current task; None outside of a loop, and if nothing has imported asyncio."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio.current_task() if asyncio else None
    except RuntimeError:
        return None


def describe(cause: BaseException) -> str:
    """An exception as one line: its type and the first line of its message; all lines if the first ends in a colon."""
    if isinstance(cause, EndOfProcess):
        return f"it called {cause.call}"
    if isinstance(cause, SystemExit):
        return f"it called sys.exit({shown(cause.code)})"
    text = beginning(str(TracebackException(type(cause), cause, None, limit=0)))  # the exception's `__str__` may raise
    lines = text.strip().splitlines()
    if lines and lines[0].endswith(":"):
        lines = [" ".join(" ".join(lines).split())]
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def place_of(cause: BaseException) -> str:
    """The end of an error: the line of user code that raised it, ' (file.py:7)'; empty where that was not user code."""
    line = line_of(cause.__traceback__)
    return f" ({line})" if line else ""


def trace_of(cause: BaseException) -> str:
    """The last 20 frames of an exception's traceback and of those of its causes, cut to LONGEST_TEXT characters."""
    parts, room = list[str](), LONGEST_TEXT
    for part in TracebackException.from_exception(cause, limit=-20).format():
        parts.append(beginning(part))
        room -= len(part)
        if room <= 0:
            break
    return beginning("".join(parts))


def foreign_trace(error: RlcoreError) -> str:
    """The traceback of the exception in user code that caused an error of a plugin or worker, also of one in another
    process; empty: none did, or it was an OSError, whose cause is the machine."""
    cause: BaseException | None = error if isinstance(error, PluginError | WorkerError) else None
    while isinstance(cause, RlcoreError):
        if isinstance(cause, ChildError) and cause.trace:
            return cause.trace
        cause = cause.__cause__
    if cause is None or isinstance(cause, OSError) or not line_of(cause.__traceback__):
        return ""
    return trace_of(cause)


def shown(value: object) -> str:
    """A value for an error: its repr on one line, cut to 80 characters; its type if the repr raises."""
    text = f"a {type(value).__name__}"
    with suppress(*ANSWERED):
        text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages: '1 prompt', '3 prompts'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def nearest(name: str, choices: "list[str] | tuple[str, ...]") -> str:
    """The end of an error about an unknown name: the nearest choice if one is near, and every choice."""
    close = get_close_matches(name, choices, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}choose from: {', '.join(sorted(choices)) or '(nothing is offered)'}"


def misspelt(names: Iterable[str], choices: Iterable[str]) -> str:
    """A question in parentheses about the unknown names that are near a choice, with a space before; empty if none
    is."""
    known = sorted(choices)
    near = {name: get_close_matches(name, known, n=1) for name in names if name not in known}
    questions = [f"'{found[0]}' instead of '{name}'" for name, found in near.items() if found]
    return f" (did you mean {' and '.join(questions)}?)" if questions else ""


class ChildError(RlcoreError):
    """Code that ran in a child process raised; the message names the exception, `trace` is its traceback as text."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace
