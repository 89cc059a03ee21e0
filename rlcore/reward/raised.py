"""Reports exceptions of a reward function with the line of the user's code that raised them."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlcore.errors import ChildError, RlcoreError, describe
from rlcore.errors.user_lines import OURS, is_below, line_of, short
from rlcore.types import Trajectory

IMPORTER = "<frozen importlib"
IMPORT_FILES = os.path.dirname(os.path.abspath(importlib.__file__)) + os.sep
"""Prefixes of file names in the traceback of an import that are neither the user's nor a library's."""
MAX_COLUMNS = 12
"""Maximum number of columns that an error names."""
MESSAGES_HINT = "its prompts and completions are lists of messages: the text is completion[-1]['content']"
WRONG_KIND = (AttributeError, TypeError)
"""Errors of a function that expects text and gets messages or None."""
ABOUT_ROW = (LookupError, *WRONG_KIND)
"""Errors that may be caused by the row's contents."""


def raise_with_line(cause: BaseException, trajectories: Sequence[Trajectory]) -> NoReturn:
    """Raise a function's exception on these samples as a ChildError with file and line; an RlcoreError unchanged.

    Errors that may be caused by the row's contents name its columns. Call it in an `except ANSWERED`, which is free
    while nothing is raised.
    """
    if isinstance(cause, RlcoreError):
        raise cause
    trace = cause.__traceback__
    where = line_of(trace.tb_next if trace else None)
    text = f"{where}: {describe(cause)}" if where else describe(cause)
    row = f" ({_row_of(trajectories, cause)})" if isinstance(cause, ABOUT_ROW) else ""
    raise ChildError(text + row) from cause


def import_failure(cause: BaseException) -> str:
    """Describes an exception while importing the user's file: file and line, the error, and a remedy.

    A missing library is distinguished from a broken one, which installing would not repair.
    """
    trace, own, own_line, inside, last = cause.__traceback__, "", "", "", ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((OURS, IMPORTER, IMPORT_FILES)):
            own = own or os.path.dirname(file)
            last = f"{short(file)}:{trace.tb_lineno}"
            if is_below(file, own):
                own_line, inside = last, ""
            else:
                inside = inside or str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        trace = trace.tb_next
    at = f"{own_line}: " if own_line else ""
    beyond = f" (in {last})" if last != own_line else ""
    return f"{at}{describe(cause)}{beyond}{_way_out(cause, inside)}"


def _way_out(cause: BaseException, inside: str) -> str:
    """A remedy for an import that failed; `inside` is the library whose code raised it, '' where the user's own did."""
    name = cause.name or "" if isinstance(cause, ImportError) else ""
    root = name.partition(".")[0]
    if isinstance(cause, ModuleNotFoundError) and root:
        if root != name and root in sys.modules:
            return (
                f"; '{root}' is installed and does not have that module: correct the name, or use another version of it"
            )
        needed = f"; '{inside}' is installed and needs it: " if inside else "; "
        return f"{needed}install '{root}' into this Python ({sys.executable})" + (
            "" if inside else f", or put {root}.py next to the file"
        )
    if name and isinstance(cause, ImportError) and not inside:
        return f"; '{root}' is there: correct the name, or use another version of it"
    if inside:
        return f"; '{inside}' is installed but broken: `{sys.executable} -c 'import {inside}'` shows it"
    return ""


def _row_of(trajectories: Sequence[Trajectory], cause: BaseException) -> str:
    prompts = [trajectory.prompt for trajectory in trajectories]
    columns = sorted({str(name) for prompt in prompts for name in prompt.columns})
    if any(prompt.answer is not None for prompt in prompts):
        columns.insert(0, "answer")
    more = ["..."] if len(columns) > MAX_COLUMNS else []
    text = "the row has " + (", ".join([*columns[:MAX_COLUMNS], *more]) or "no columns besides the prompt")
    if isinstance(cause, WRONG_KIND) and any(prompt.conversational for prompt in prompts):
        text += f"; {MESSAGES_HINT}"
    return text
