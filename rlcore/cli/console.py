"""All that commands print goes through here: as wide as it needs to be in a pipe, and only what may be shown."""

import contextlib
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


def complain(text: str) -> None:
    """Writes an error to standard error; does nothing when that is closed."""
    with contextlib.suppress(OSError):
        print(displayable(text), file=sys.stderr, flush=True)
