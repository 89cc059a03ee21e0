"""Directories of tests, in every package of the repository.

What a passing test wrote is removed (`tmp_path_retention_policy`). An empty directory stays, so no later test is given
its name: Python imports a file of a path once, and a test may write a module of the same path as an earlier one.
"""

from pathlib import Path
from typing import Any

import pytest


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Make the directory of a test again."""
    if fixturedef.argname == "tmp_path" and fixturedef.cached_result is not None:
        directory = fixturedef.cached_result[0]
        if isinstance(directory, Path):
            directory.mkdir(exist_ok=True)
