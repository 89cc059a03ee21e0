"""The plugin that weakens checks finds the one that no test holds, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fault

ROOT = Path(__file__).parent.parent.parent

MODULE = """
def clause(value) -> str:
    if value < 0:
        return "is below 0"
    return ""

def check(value, name):
    if clause(value):
        raise ValueError(f"{name} {clause(value)}")
    if value > 9 or not name:
        raise ValueError("too much, or no name")
"""
TESTS = """
import pytest, checked_here

@pytest.mark.parametrize(("value", "name"), [(-1, "x"), (10, "x")])
def test_refused(value, name):
    with pytest.raises(ValueError):
        checked_here.check(value, name)

def test_taken():
    checked_here.check(1, "x")
"""
NAMELESS = """
def test_no_name():
    with pytest.raises(ValueError):
        checked_here.check(1, "")
"""
NOT_RUN = """
@pytest.mark.slow
def test_slow():
    pytest.fail("a slow test is run only while a check is free")
"""


def weakened(directory: Path, tests: str, *more: str, module: str = "checked_here.py") -> tuple[int, list[str]]:
    """The exit code of a run that weakens the module, and the checks that are reported as held by no test."""
    (directory / "checked_here.py").write_text(MODULE)
    (directory / "test_them.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "weakened", "-p", "no:cacheprovider", "--weaken"]
    path = os.pathsep.join((str(ROOT / "tests" / "weakened"), str(directory)))
    done = subprocess.run(
        [*command, module, *more, "test_them.py"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("FREE")]


def test_a_check_that_no_test_holds_is_named_and_the_run_fails(tmp_path: Path) -> None:
    assert weakened(tmp_path, TESTS) == (1, ["FREE checked_here.py:10 if not name"])
    assert weakened(tmp_path, TESTS + NAMELESS) == (0, [])


def test_a_slow_test_is_run_last_and_only_while_a_check_is_free(tmp_path: Path) -> None:
    assert weakened(tmp_path, TESTS + NAMELESS.replace("def ", "@pytest.mark.slow\ndef ")) == (0, [])
    assert weakened(tmp_path, TESTS + NOT_RUN + NAMELESS) == (0, [])


def test_a_check_that_no_test_can_hold_is_not_reported(tmp_path: Path) -> None:
    assert weakened(tmp_path, TESTS + NOT_RUN, "--unreachable", "if not name") == (0, [])


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert weakened(tmp_path, TESTS + NAMELESS, module="moved_away.py") == (pytest.ExitCode.USAGE_ERROR, [])
