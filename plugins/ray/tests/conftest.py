"""Every test of this plugin fails if it leaves processes, threads or tasks behind."""

from collections.abc import Iterator

import pytest

from rlcore.testing.leaks import leaks


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with leaks():
        yield
