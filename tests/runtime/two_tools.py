"""A plugin whose agent asks for two tools, for tests of how workers start and close."""

from pathlib import Path

from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import write_package

PLUGIN = """
    import time
    from rlcore import AgentLoop, Component, Role, Worker, WorkerClass, WorkerRequest, hookimpl

    class Tool(Worker):
        def setup(self):
            directory = self.context.run_dir
            (directory / f"{self.context.role} begins").touch()
            ends = time.monotonic() + 20
            while not {wait}:
                if time.monotonic() > ends:
                    raise TimeoutError("the other tool does not begin")
                time.sleep(0.01)
            {then}

        def close(self):
            {close}

        async def items(self):
            yield "first"
            time.sleep({busy_s})
            (self.context.run_dir / f"{self.context.role} computed").touch()

    class Agent(AgentLoop):
        def __init__(self, context):
            Agent.hammer = context.workers(Role("hammer", Tool))

        async def start(self): ...

        async def close(self): ...

        def rollout(self, tasks, sampling, lane): ...

    def asks(config, section):
        return [WorkerRequest(Role(name, Tool), "t", isolated={isolated}) for name in ("hammer", "saw")]

    @hookimpl
    def rlcore_agent_loops():
        return [Component("tooled", Agent, asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Tool, "t", Tool)]
"""


def planned(
    site: Path,
    *,
    wait: str = "True",
    then: str = "pass",
    close: str = "pass",
    busy_s: float = 0.0,
    isolated: bool = True,
) -> RunPlan:
    """A run with two tools, hammer and saw. In `setup` each waits until `wait` is true, then does `then`.

    After the first of its `items` a tool is busy for `busy_s`.
    """
    parts = {"wait": wait, "then": then, "close": close, "busy_s": str(busy_s), "isolated": str(isolated)}
    text = PLUGIN
    for name, part in parts.items():
        text = text.replace(f"{{{name}}}", part)
    write_package(site, "written_tools", text)
    return plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "written_tools"])
