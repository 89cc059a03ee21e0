"""`make fault` and `make vllm` count on tests of one group running one at a time, which no failure would tell of."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
from pathlib import Path

import pytest


@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("number", range(4))
def test_of_a_group(number):
    Path(__file__).with_name(f"{number}.process").write_text(str(os.getpid()))
"""


@pytest.mark.fault
def test_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_grouped.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    processes = [path.read_text() for path in tmp_path.glob("*.process")]
    assert len(processes) == 4
    assert len(set(processes)) == 1
