"""All that commands print goes through here: as wide as it needs to be in a pipe, and only what may be shown."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rlcore.errors.redaction import displayable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 200


def stdout() -> "Console":
    """The console that commands print their tables to."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> "Table":
    """A table whose cells are printed as they may be shown, never as markup."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(Text(displayable(column)), overflow="fold", header_style="dim")
    for row in rows:
        made.add_row(*(Text(displayable(str(cell))) for cell in row))
    return made


def say(console: "Console", text: str) -> None:
    """One paragraph, printed as it may be shown, never as markup."""
    from rich.text import Text

    console.print(Text(displayable(text)), soft_wrap=True)


def answer(text: str) -> None:
    """Text for people or programs, to standard output."""
    print(displayable(text))


def complain(text: str, end: str = "\n") -> None:
    """Writes an error or a prompt to standard error; does nothing when that is closed."""
    with contextlib.suppress(OSError, ValueError):
        print(displayable(text), end=end, file=sys.stderr, flush=True)


def drop_impossible_sizes() -> None:
    """Forget a size of the terminal that no terminal has, and of which rich would make a ValueError."""
    for name in ("COLUMNS", "LINES"):
        if len(os.environ.get(name, "")) > 5:
            del os.environ[name]


def open_closed_streams() -> None:
    """Give standard streams that are closed to the null device.

    A file of the run would get the number of one that is closed, and everything that is printed.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):  # something else has the number by now
                os.fstat(number)
                continue
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number, inheritable=True)
            if null != number:
                os.close(null)
            else:
                os.set_inheritable(number, True)
            stream = open(number, mode, closefd=False)  # noqa: SIM115 (for the life of the process)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def escape_unknown_characters() -> None:
    """Let standard streams write what their encoding lacks, such as one of LC_ALL=C, as escapes.

    An error of the encoding would end a command, and everything that a run prints after it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
