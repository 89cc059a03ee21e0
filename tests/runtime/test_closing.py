"""The time that workers have to close: enough for an engine at the end of a run, little when the run is cut short."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.contracts.clusters import Deadlines
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

PLUGIN = """
    import time
    from rlcore import AgentLoop, Component, Role, Worker, WorkerClass, WorkerRequest, hookimpl

    class Tool(Worker):
        def setup(self): ...

        def close(self):
            (self.context.run_dir / "closing").touch()
            time.sleep({seconds})
            (self.context.run_dir / "closed").touch()

    class Agent(AgentLoop):
        def __init__(self, context): ...

        async def start(self): ...

        async def close(self): ...

        def rollout(self, tasks, sampling, lane): ...

    @hookimpl
    def rlcore_agent_loops():
        asks = lambda config, section: [WorkerRequest(Role("tool", Tool), "t", isolated=True)]
        return [Component("tooled", Agent, asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Tool, "t", Tool)]
"""


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
    write_package(site, "closing_tool", PLUGIN.replace("{seconds}", "60" if cut_short else "1"))
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "closing_tool"])

    async def story() -> None:
        async with launch(plan, tmp_path, Deadlines(close_s=0.5)):
            if cut_short:
                raise KeyError("mine")

    if cut_short:
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(story())
    else:
        asyncio.run(story())
    assert (tmp_path / "closing").exists()
    assert (tmp_path / "closed").exists() is not cut_short
    late = [message for message in caplog.messages if "tool[0].close() took longer than 0.5 s" in message]
    assert len(late) == int(cut_short)
