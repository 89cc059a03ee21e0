"""A test's directory is emptied when the test passes, and no later test is given its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

seen = []


@pytest.fixture
def written(tmp_path):
    (tmp_path / "weights").write_bytes(b"0")
    return tmp_path


@pytest.mark.parametrize("turn", [0, 1])
def test_of_a_directory(written, turn):
    assert [path.name for path in written.iterdir()] == ["weights"]
    assert [list(path.iterdir()) for path in seen] == [[]] * turn
    assert written not in seen
    seen.append(written)
"""


@pytest.mark.slow
def test_a_directory_is_emptied_and_its_name_not_given_twice(tmp_path: Path) -> None:
    (tmp_path / "test_directories.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
