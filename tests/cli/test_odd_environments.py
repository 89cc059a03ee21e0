"""Environments in which rlcore is started: each command answers, or says in one line what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.cli import console, main


def test_a_working_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan"]) == 2
    assert "rlcore: the working directory is gone" in capsys.readouterr().err


def test_sizes_that_no_terminal_has_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "9" * 5000)
    monkeypatch.setenv("LINES", "40")
    console.drop_impossible_sizes()
    assert (os.environ.get("COLUMNS"), os.environ["LINES"]) == (None, "40")


CLOSED = """
import os, sys
for number in (0, 1, 2):
    os.close(number)
sys.stdin = sys.stdout = sys.stderr = None
from rlcore.cli.console import open_closed_streams
open_closed_streams()
print("nowhere")
with open(sys.argv[1], "w") as file:
    file.write(f"{file.fileno()} {[os.path.realpath(f'/proc/self/fd/{number}') for number in (0, 1, 2)]}")
    sys.exit(0 if all(map(os.get_inheritable, (0, 1, 2))) else 1)
"""


def test_files_do_not_get_the_numbers_of_streams_that_are_closed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path / "file")], check=True, timeout=60)
    number, _, streams = (tmp_path / "file").read_text().partition(" ")
    assert int(number) > 2
    assert streams == str(["/dev/null"] * 3)
