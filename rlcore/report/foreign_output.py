"""Shows prints of foreign code in this process, such as async reward functions, without secrets or control characters.

Native code, and children that inherit the descriptors, write past it.
"""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from rlcore.errors import describe
from rlcore.errors.redaction import begun_secret, displayable

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

LONGEST_LINE = 1 << 16
"""Most characters of an unfinished line that are kept before it is shown."""


LOGGING_S = 5.0
"""Longest wait for the log to say that an output is gone."""
UNWRITABLE = (OSError, ValueError)
"""Errors of writing to an output: its reader is gone, its disk is full, or foreign code has closed it."""


_logging: list[threading.Thread] = []


def discard(output: TextIO, cause: Exception) -> None:
    """Send everything that any code writes to this output to the null device from now on, and log that.

    A caller may hold locks of the terminal, and those who log may hold their handler's and wait for the terminal's, so
    another thread logs it; see `wait_until_logged`.
    """
    name = "error" if output is sys.__stderr__ else "output"
    with open(os.devnull, "w") as null, contextlib.suppress(*UNWRITABLE):
        os.dup2(null.fileno(), output.fileno())
    text = f"standard {name} is gone ({describe(cause)}): nothing more is shown; training continues"
    thread = threading.Thread(target=logger.warning, args=("%s", text), name="logging a lost output", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        thread.start()
        _logging.append(thread)


def wait_until_logged() -> None:
    """Return when the log says of each lost output that it is gone; for a caller without locks."""
    while _logging:
        _logging.pop().join(LOGGING_S)


def write_readably(output: TextIO, text: str) -> None:
    """Write text; characters that the output's encoding lacks are escaped."""
    try:
        output.write(text)
    except UnicodeEncodeError:
        encoding = output.encoding or "ascii"
        output.write(text.encode(encoding, "backslashreplace").decode(encoding))


class ForeignOutput:
    """Replaces sys.stdout or sys.stderr: shows whole lines, above a progress bar if there is one.

    If its reader goes away, the rest is discarded, so that code that prints does not fail.
    """

    def __init__(self, output: TextIO) -> None:
        self.rich_proxied_file = output  # the name under which rich looks for the output behind a proxy
        self.console: Console | None = None
        """The console with a progress bar, which a plain line would break."""
        self._line = ""
        self._is_gone = False

    def write(self, text: str) -> int:
        """Show the lines that the text completes; TypeError unless it is text, like any file."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._show(line)
        if len(self._line) > LONGEST_LINE:
            shown = len(self._line) - begun_secret(self._line)  # half a secret would not be recognised
            self._show(self._line[:shown])
            self._line = self._line[shown:]
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write the lines one after another."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the output, without an unfinished line: half a secret would not be recognised."""
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
                write_readably(self.rich_proxied_file, f"{displayable(line)}\n")
            except UNWRITABLE as cause:
                self._discard(cause)

    def _discard(self, cause: Exception) -> None:
        if not self._is_gone:  # another thread may have found out, too
            self._is_gone = True
            discard(self.rich_proxied_file, cause)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def _is_terminal(output: TextIO) -> bool:
    with contextlib.suppress(*UNWRITABLE):
        return output.isatty()
    return False


@contextmanager
def foreign_output() -> Iterator[None]:
    """Show everything that is printed inside without secrets or control characters."""
    before = sys.stdout, sys.stderr
    ours = tuple(ForeignOutput(output) for output in before)
    sys.stdout, sys.stderr = (cast(TextIO, output) for output in ours)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in ours:
            output.finish()
        wait_until_logged()


@contextmanager
def above_progress_bar(console: "Console") -> Iterator[None]:
    """Show prints inside above the progress bar of this console, unless they go to another place than a terminal."""
    found = [output for output in (sys.stdout, sys.stderr) if isinstance(output, ForeignOutput)]
    outputs = [output for output in found if output is sys.stdout or _is_terminal(output.rich_proxied_file)]
    for output in outputs:
        output.console = console
    try:
        yield
    finally:
        for output in outputs:
            output.console = None
