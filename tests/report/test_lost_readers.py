"""Prints of foreign code whose reader has gone are discarded, and the log says so once."""

import os
import sys
from pathlib import Path

import pytest

from rlcore.report.foreign_output import ForeignOutput, foreign_output
from rlcore.report.terminal import Terminal


def test_what_is_printed_after_the_reader_has_gone_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        output = ForeignOutput(file)
        os.close(read)
        for _ in range(3):
            output.write("x" * 70_000 + "\n")
            output.flush()
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
