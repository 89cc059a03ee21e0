"""Prints of foreign code whose reader has gone are discarded, and the log says so once."""

import os

import pytest

from rlcore.report.foreign_output import ForeignOutput


def test_what_is_printed_after_the_reader_has_gone_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        output = ForeignOutput(file)
        os.close(read)
        for _ in range(3):
            output.write("x" * 70_000 + "\n")
            output.flush()
    assert caplog.text.count("is gone (BrokenPipeError") == 1
    assert caplog.text.count("training goes on") == 1
