"""Every example plugin passes `rlcore plugins --check`, and its pyproject.toml names what it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing.packages import write_metadata

HERE = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in HERE.glob("*/pyproject.toml"))


@pytest.fixture
def installed(tmp_path: Path) -> list[str]:
    """Metadata as an installer would leave it; the names of the plugins."""
    return [name for package in PACKAGES for name in write_metadata(tmp_path, package)]


@pytest.mark.fault
def test_every_example_plugin_passes_the_check(installed: list[str], tmp_path: Path) -> None:
    assert installed == [package.name for package in PACKAGES]
    paths = os.pathsep.join(map(str, [tmp_path, *PACKAGES]))
    for name in installed:
        command = [sys.executable, "-m", "rlcore", "plugins", "--check", name]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
