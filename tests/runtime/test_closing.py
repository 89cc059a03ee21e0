"""The time that workers have to close: enough for an engine at the end of a run, little when the run is cut short."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from two_tools import planned

from rlcore.contracts.clusters import Deadlines
from rlcore.runtime.launch import launch
from rlcore.testing.packages import importable

CLOSE = """directory = self.context.run_dir
            (directory / f"{self.context.role} closing").touch()
            time.sleep(SECONDS)
            (directory / f"{self.context.role} closed").touch()"""
TOOLS = ("hammer", "saw")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as place:
        yield place


@pytest.mark.slow
@pytest.mark.parametrize("cut_short", [False, True])
def test_a_worker_may_close_slowly_unless_the_run_is_cut_short(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, cut_short: bool
) -> None:
    """vLLM takes seconds to end its processes, and a signal leaves a run ten for everything."""
    plan = planned(site, close=CLOSE.replace("SECONDS", "60" if cut_short else "1"))

    async def story() -> None:
        async with launch(plan, tmp_path, Deadlines(close_s=0.5)):
            if cut_short:
                raise KeyError("mine")

    if cut_short:
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(story())
    else:
        asyncio.run(story())
    assert all((tmp_path / f"{tool} closing").exists() for tool in TOOLS)
    assert [tool for tool in TOOLS if (tmp_path / f"{tool} closed").exists()] == ([] if cut_short else list(TOOLS))
    late = [message for message in caplog.messages if "].close() took longer than 0.5 s" in message]
    assert len(late) == (len(TOOLS) if cut_short else 0)


@pytest.mark.slow
def test_a_run_that_is_cut_short_leaves_a_stream_whose_worker_computes(site: Path, tmp_path: Path) -> None:
    plan = planned(site, busy_s=8.0)

    async def story() -> None:
        async with launch(plan, tmp_path, Deadlines(close_s=0.5)):
            plugin = sys.modules["written_tools"]
            [replica] = plugin.Agent.hammer.replicas
            async with aclosing(replica.stream(plugin.Tool.items)) as items:
                assert await anext(items) == "first"
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(story())
    assert (tmp_path / "hammer begins").exists()
    assert not (tmp_path / "hammer computed").exists()
