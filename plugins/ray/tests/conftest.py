"""What every test of this plugin gets: nothing may be left running behind it."""

from collections.abc import Iterator

import pytest

from rlcore.testing.leaks import leaks


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with leaks():
        yield
