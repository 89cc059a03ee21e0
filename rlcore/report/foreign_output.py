"""Prints of others' code in this process, such as async reward functions: no secrets and no control characters.

What native code or a child that inherits the descriptors writes does not come through here.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from rlcore.errors import describe
from rlcore.errors.redaction import displayable

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

LONGEST_LINE = 1 << 16
"""Characters of a line without an end that are kept until it is shown."""


UNWRITABLE = (OSError, ValueError)
"""Errors of writing to an output: its reader has gone, its disk is full, or others' code has closed it."""


def discard(output: TextIO, cause: Exception) -> None:
    """Let what is written to this output from now on go to the null device, also by others; the log says so."""
    name = "error" if output is sys.__stderr__ else "output"
    logger.warning("standard %s is gone (%s): nothing more is shown; training continues", name, describe(cause))
    with open(os.devnull, "w") as null, contextlib.suppress(*UNWRITABLE):
        os.dup2(null.fileno(), output.fileno())


class ForeignOutput:
    """Stands in for sys.stdout or sys.stderr: shows whole lines, above a progress bar if there is one.

    When its reader goes away, the rest is discarded: code that prints is not to fail of it.
    """

    def __init__(self, output: TextIO) -> None:
        self.rich_proxied_file = output  # the name under which rich looks for the output behind a proxy
        self.console: Console | None = None
        """Has a progress bar, which a plain line would tear."""
        self._line = ""
        self._is_gone = False

    def write(self, text: str) -> int:
        """Show the lines that end in the text; what is not a text is a TypeError, as of any file."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._show(line)
        if len(self._line) > LONGEST_LINE:
            self.finish()
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write one after another."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Lines are shown when they end, so that no secret is shown in halves."""
        if not self._is_gone:
            try:
                self.rich_proxied_file.flush()
            except UNWRITABLE as cause:
                self._discard(cause)

    def close(self) -> None:
        """Stay open: rlcore shows the rest of the run here."""

    def finish(self) -> None:
        """Show the rest of a line that has not ended."""
        if self._line:
            line, self._line = self._line, ""
            self._show(line)

    def _show(self, line: str) -> None:
        if self.console is not None and self.console.is_terminal:
            from rich.text import Text

            self.console.print(Text(displayable(line)), soft_wrap=True)
            return
        if not self._is_gone:
            try:
                self.rich_proxied_file.write(f"{displayable(line)}\n")
            except UNWRITABLE as cause:
                self._discard(cause)

    def _discard(self, cause: Exception) -> None:
        discard(self.rich_proxied_file, cause)
        self._is_gone = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def foreign_output() -> Iterator[None]:
    """Inside, what is printed is shown as it may be."""
    before = sys.stdout, sys.stderr
    ours = tuple(ForeignOutput(output) for output in before)
    sys.stdout, sys.stderr = (cast(TextIO, output) for output in ours)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in ours:
            output.finish()


@contextmanager
def beside(console: "Console") -> Iterator[None]:
    """Inside, prints go above the progress bar of this console."""
    outputs = [output for output in (sys.stdout, sys.stderr) if isinstance(output, ForeignOutput)]
    for output in outputs:
        output.console = console
    try:
        yield
    finally:
        for output in outputs:
            output.console = None
