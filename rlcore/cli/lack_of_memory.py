"""Describes a lack of memory in the command itself in one line; workers report theirs with the plan's estimate."""

import errno
from collections.abc import Iterator

from rlcore.errors import describe

MARKS = ("failed to map segment", "cannot allocate memory", "cannot apply additional memory protection")
"""Words of the loader of shared libraries for a lack of memory."""
REMEDY = "needs more: raise the limit of this shell (ulimit -v) or container, or choose a larger machine"


def lack_of_memory(error: BaseException | None) -> str:
    """The line about a lack of memory that is the error, or a cause of it; else empty."""
    for cause in _causes(error):
        text = str(cause)
        if isinstance(cause, ImportError) and any(mark in text.lower() for mark in MARKS):
            library = (cause.name or "").partition(".")[0] or "a library"
            line = next(line for line in text.splitlines() if any(mark in line.lower() for mark in MARKS))
            return f"not enough memory to import {library}: {line}; {REMEDY}"
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM):
            return f"not enough memory: {describe(cause)}{_place(cause)}; {REMEDY}"
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the chain of its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _place(cause: BaseException) -> str:
    trace = cause.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f", at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
