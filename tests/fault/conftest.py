"""Makes the helpers of this directory importable, and has one process per session to fork runs from."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def forked_runs() -> Iterator[None]:
    """`fork_run` works: see forked_runs.py."""
    from forked_runs import to_be_forked

    with to_be_forked():
        yield
