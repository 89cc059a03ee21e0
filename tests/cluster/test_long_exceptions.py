"""The text of an exception is cut in the child, so that neither a message nor a sample holds all of it."""

import asyncio
from pathlib import Path

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.errors import ChildError
from rlcore.errors.redaction import LONGEST_TEXT
from rlcore.testing.leaks import leaks

SERVED = """
from rlcore.errors import ConfigError

class Served:
    def foreign(self):
        raise ValueError("x" * 30_000_000)
    def ours(self):
        raise ConfigError("x" * 30_000_000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_the_text_of_an_exception_is_cut_before_it_is_sent(tmp_path: Path, kind: str) -> None:
    (tmp_path / "served.py").write_text(SERVED)

    async def call() -> ChildError:
        children = ChildProcesses()
        try:
            child = await children.start(f"{tmp_path}/served.py:Served", name="served")
            with pytest.raises(ChildError) as caught:
                await child.call(kind, deadline_s=30)
            return caught.value
        finally:
            await children.close()

    with leaks():
        error = asyncio.run(call())
    assert 10_000 < len(str(error)) <= LONGEST_TEXT
    assert len(error.trace) <= LONGEST_TEXT
