"""Fixtures of every test: nothing is left running, and nothing heavy is imported without need."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.testing.leaks import leaks

SUITES = ("fault", "real", "gpu")
"""Directories that hold nothing but tests of the mark of that name."""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with leaks():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Tests that do not need a GPU see none, so that defaults are a CPU's on every machine."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A directory whose tests would all be deselected: each worker would import it, and what it imports."""
    suite = collection_path.name
    if collection_path.parent == Path(__file__).parent and suite in SUITES:
        return True if f"not {suite}" in config.option.markexpr else None
    return None
