"""Prints the output of commands: wide enough in a pipe, and without secrets and control characters."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rlcore.errors.redaction import bounded, displayable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 200


def stdout() -> "Console":
    """The console that commands print their tables to."""
    from rich.console import Console

    class LastingConsole(Console):
        """Leaves a reader that is gone to the command, instead of ending the process."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = LastingConsole(highlight=False)
    return console if console.is_terminal else LastingConsole(highlight=False, width=_PIPE_WIDTH)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> "Table":
    """A table whose title, columns and cells are displayable text, never markup."""
    from rich.table import Table
    from rich.text import Text

    heading = Text(displayable(title))
    made = Table(
        title=heading, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        made.add_column(Text(displayable(column)), overflow="fold", header_style="dim")
    for row in rows:
        made.add_row(*(Text(displayable(str(cell))) for cell in row))
    return made


def say(console: "Console", text: str) -> None:
    """Print one paragraph of displayable text, never as markup."""
    from rich.text import Text

    console.print(Text(displayable(text)), soft_wrap=True)


def answer(text: str) -> None:
    """Print text for people or programs to standard output."""
    print(displayable(text))


@contextlib.contextmanager
def outliving_reader() -> Iterator[None]:
    """Print inside the block; if standard output cannot be written (`| head`), leave the block and discard the rest."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        # What is buffered would fail again when the command ends, and change its exit code.
        with open(os.devnull, "w") as null, contextlib.suppress(OSError, ValueError):
            os.dup2(null.fileno(), sys.stdout.fileno())


def report(text: str) -> None:
    """Print progress to standard output immediately, while something reads it."""
    with outliving_reader():
        answer(text)


def complain(text: str, end: str = "\n") -> None:
    """Write an error or a prompt to standard error; do nothing if that is closed."""
    with contextlib.suppress(OSError, ValueError):
        print(bounded(text), end=end, file=sys.stderr, flush=True)


def drop_impossible_sizes() -> None:
    """Drop an impossible size of the terminal, for which rich would raise ValueError."""
    for name in ("COLUMNS", "LINES"):
        if len(os.environ.get(name, "")) > 5:
            del os.environ[name]


def open_closed_streams() -> None:
    """Connect closed standard streams to the null device.

    Otherwise a file of the run would get the number of a closed stream, and everything that is printed.
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
    """Let standard streams write characters that their encoding lacks, for example with LC_ALL=C, as escapes.

    An encoding error would end the command or the output of a run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
