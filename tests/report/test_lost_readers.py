"""Prints of foreign code whose reader has gone are discarded, and the log says so once."""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

import pytest

from rlcore.report import foreign_output as foreign_output_module
from rlcore.report.foreign_output import ForeignOutput, foreign_output, wait_until_logged
from rlcore.report.terminal import Terminal


def test_what_is_printed_after_the_reader_has_gone_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        output = ForeignOutput(file)
        os.close(read)
        for _ in range(3):
            output.write("x" * 70_000 + "\n")
            output.flush()
    wait_until_logged()
    assert caplog.text.count("is gone (BrokenPipeError") == 1
    assert caplog.text.count("training continues") == 1


def test_code_that_closes_or_replaces_standard_output_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with (tmp_path / "output").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with foreign_output():
            terminal = Terminal()
            sys.stdout.close()
            print("still there")
            sys.stdout.buffer.raw.close()
            sys.stdout.flush()
            print("lost")
            sys.stdout = None  # type: ignore[assignment]
            for _ in range(3):
                terminal.say("lost")
        monkeypatch.undo()
    assert (tmp_path / "output").read_text() == ""
    assert caplog.text.count("is gone (ValueError") == 2  # once for what others print, once for the terminal


class Lost(io.StringIO):
    """A terminal that goes while `goes` is set; its writes take as long as a system call."""

    encoding = "latin-1"
    goes = False

    def __init__(self, null: TextIO) -> None:
        super().__init__()
        self._null = null

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._null.fileno()

    def write(self, text: str) -> int:
        time.sleep(0.001)
        if self.goes:
            raise OSError(5, "Input/output error")
        text.encode(self.encoding)
        return super().write(text)


@pytest.fixture
def lost() -> Iterator[Lost]:
    with open(os.devnull, "w") as null:
        yield Lost(null)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("has_bar", [False, True])
def test_handlers_of_a_library_that_write_to_a_terminal_that_goes_end_and_stop_nothing(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, has_bar: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", lost)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    held, logged, warn = threading.Event(), threading.Event(), foreign_output_module.logger.warning
    gone: list[Any] = []
    with foreign_output():
        terminal = Terminal()
        handler = logging.StreamHandler(sys.stdout)  # as logging.basicConfig makes it
        logging.getLogger().addHandler(handler)
        monkeypatch.setattr(foreign_output_module.logger, "warning", lambda *of: (gone.append(of), warn(*of)))
        with terminal.showing() if has_bar else nullcontext():

            def draw() -> None:
                with terminal._bar.live._lock:
                    held.set()
                    time.sleep(0.2)  # the other thread has the handler's lock, and wants this one
                    lost.goes = True
                    terminal.say("a line")
                logged.set()

            drawing = threading.Thread(target=draw, daemon=True)
            drawing.start()
            assert held.wait(10)
            logging.getLogger("some.library").warning("noise")
            assert logged.wait(10), "neither thread goes on"
            drawing.join(10)
            print("more")
    assert len(gone) == 2, "once for the terminal, once for what others print"


def test_characters_that_an_output_cannot_show_are_escaped_and_the_rest_is_shown(
    lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", lost)
    with foreign_output():
        terminal = Terminal()
        terminal.say("prompt: \u6570")
        print("caf\u00e9 \u6570")
        terminal.say("still here")
    assert lost.getvalue().splitlines() == ["prompt: \\u6570", "caf\u00e9 \\u6570", "still here"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_standard_error_that_goes_to_a_file_is_written_there_also_below_a_bar(
    lost: Lost, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", lost)
    errors = io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    with foreign_output(), Terminal().showing():
        print("a problem", file=sys.stderr)
    assert ("a problem" in errors.getvalue()) is not is_terminal
    assert ("a problem" in lost.getvalue()) is is_terminal
