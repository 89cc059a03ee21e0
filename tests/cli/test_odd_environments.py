"""Environments in which rlcore is started: each command answers, or says in one line what is missing."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlcore.cli import console, main
from rlcore.testing.runs import run_settings


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


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1:strict", "utf-8:strict"])
def test_what_the_encoding_of_the_terminal_lacks_is_escaped_and_the_rest_is_printed(encoding: str) -> None:
    """An error of the encoding passed for a reader that had gone: a run went on and printed nothing more."""
    program = (
        "import sys; from rlcore.cli import main, console; sys.argv[1:] = ['--version']; main()\n"
        "console.answer('first \\u4f60 \\ud800'); console.complain('\\u4f60'); console.answer('last')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    *_, first, last = done.stdout.splitlines()
    assert first.startswith(b"first ")
    assert last == b"last"


def test_without_a_directory_for_temporary_files_training_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    settings = run_settings(tmp_path, 8)
    assert main(["train", "--plugin", "null", *(f"{key}={value}" for key, value in settings.items())]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rlcore: train: FileNotFoundError: ")
    assert last.endswith("set TMPDIR")


@pytest.mark.parametrize("command", [["where"], ["resume"], ["chat"], ["runs"], ["export", "."], ["init"]])
def test_a_path_that_is_too_long_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "b" * 5000])
    assert left.value.code == 2
    assert "is too long for a path; needs names of at most 255 bytes" in capsys.readouterr().err
