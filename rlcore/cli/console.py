"""Tables on the terminal, and as wide as they need to be in a pipe."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcore.config import redact

_PIPE_WIDTH = 200


def stdout() -> Console:
    """The console that commands print their answers to."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose cells are printed as they are, without secrets."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, overflow="fold", header_style="dim")
    for row in rows:
        made.add_row(*(Text(redact(str(cell))) for cell in row))
    return made


def say(console: Console, text: str) -> None:
    """One paragraph, printed as it is, without secrets."""
    console.print(Text(redact(text)), soft_wrap=True)
