"""Every example plugin passes `rlcore plugins --check`, and its pyproject.toml names what it is."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in HERE.glob("*/pyproject.toml"))


@pytest.fixture
def installed(tmp_path: Path) -> list[str]:
    """Metadata as an installer would leave it; the names of the plugins."""
    names = []
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        requires = "".join(f"Requires-Dist: {text}\n" for text in project["dependencies"])
        head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(head + requires)
        entries = project["entry-points"]["rlcore"]
        (info / "entry_points.txt").write_text("[rlcore]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()))
        names += list(entries)
    return names


@pytest.mark.fault
def test_every_example_plugin_passes_the_check(installed: list[str], tmp_path: Path) -> None:
    assert installed == [package.name for package in PACKAGES]
    paths = os.pathsep.join(map(str, [tmp_path, *PACKAGES]))
    for name in installed:
        command = [sys.executable, "-m", "rlcore", "plugins", "--check", name]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
