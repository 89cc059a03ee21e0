"""Memory that runs out in a command is one line and exit code 2; other bugs keep their traceback."""

import errno
import traceback
from typing import Any, NoReturn

import pytest

import rlcore.cli
from rlcore.cli import main

MAPPED = "libtorch_cpu.so: failed to map segment from shared object"


def numpy_s_import() -> NoReturn:
    """numpy tells what failed below a text of thirty lines."""
    try:
        raise ImportError(MAPPED, name="numpy._core")
    except ImportError as error:
        raise ImportError("IMPORTANT: PLEASE READ THIS\n\nfor advice", name="numpy") from error


def raised(error: BaseException) -> NoReturn:
    raise error


ERRORS: dict[str, tuple[Any, str]] = {
    "torch": (lambda: raised(ImportError(MAPPED, name="torch._C")), f"not enough memory to import torch: {MAPPED}; "),
    "numpy": (numpy_s_import, f"not enough memory to import numpy: {MAPPED}; needs more"),
    "no name": (lambda: raised(ImportError(f"x\n{MAPPED}")), f"not enough memory to import a library: {MAPPED}; "),
    "python": (lambda: raised(MemoryError()), "not enough memory: MemoryError, at "),
    "fork": (lambda: raised(OSError(errno.ENOMEM, "Cannot allocate memory")), "not enough memory: OSError: [Errno 12]"),
}


def run(monkeypatch: pytest.MonkeyPatch, command: Any) -> int:
    monkeypatch.setattr(rlcore.cli, "_command", lambda arguments: command())
    return main(["plan"])


@pytest.mark.parametrize("name", ERRORS)
def test_memory_that_runs_out_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command, words = ERRORS[name]
    assert run(monkeypatch, command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlcore: {words}")


@pytest.mark.parametrize("error", [ImportError("cannot import name x"), OSError(errno.EIO, "x"), KeyError("x")])
def test_other_bugs_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    assert run(monkeypatch, lambda: raised(error)) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_no_memory_to_format_an_error_is_still_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traceback, "format_exception", lambda *arguments: raised(MemoryError()))
    assert run(monkeypatch, lambda: raised(KeyError("x"))) == 2
    assert capfd.readouterr().err == "rlcore: not enough memory\n"
