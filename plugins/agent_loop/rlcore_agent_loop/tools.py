"""Runs tool calls in child processes that can be killed; whatever happens, the policy gets a text."""

import asyncio
from collections.abc import Sequence

from rlcore.errors import ChildError, RlcoreError, nearest
from rlcore.workers import Child, Children
from rlcore_agent_loop.calls import ToolCall
from rlcore_agent_loop.settings import AgentLoopSettings, absolute

START_S = 60.0
"""Seconds that a child may take to import the tools."""


class Tools:
    """A pool of children, each with all tools, one call at a time in each."""

    def __init__(self, children: Children, settings: AgentLoopSettings) -> None:
        self._children = children
        self._settings = settings
        self._idle: asyncio.Queue[Child] = asyncio.Queue()
        self._all: set[Child] = set()
        self.num_calls = 0
        self.num_errors = 0

    async def start(self) -> None:
        """Start the children; PluginError or ChildError naming the tool that cannot be imported."""
        for index in range(self._settings.children):
            self._idle.put_nowait(await self._start_child(index))

    async def close(self) -> None:
        """End the children; also more than once."""
        children, self._all = self._all, set()
        await asyncio.gather(*(child.close() for child in children))

    async def results(self, calls: Sequence[ToolCall]) -> list[str]:
        """The result of each call, made one after the other."""
        return [await self._result(call) for call in calls]

    async def _result(self, call: ToolCall) -> str:
        self.num_calls += 1
        text, problem = "", call.problem
        if not problem and call.name not in self._settings.tools:
            problem = f"there is no tool '{call.name}'; {nearest(call.name, list(self._settings.tools))}"
        if not problem:
            text, problem = await self._run(call)
        if problem:
            self.num_errors += 1
        return f"error: {problem[: self._settings.max_result_chars]}" if problem else text

    async def _run(self, call: ToolCall) -> tuple[str, str]:
        """(result, problem); one of them is empty."""
        deadline_s = self._settings.tools[call.name].deadline_s
        child = await self._idle.get()
        try:
            if not child.alive:
                child = await self._replace(child)
            return await child.call("call", call.name, dict(call.arguments), deadline_s=deadline_s), ""
        except TimeoutError:
            return "", f"{call.name} took longer than {deadline_s:g} s"
        except ChildError as cause:
            return "", str(cause)
        except RlcoreError:
            return "", f"{call.name} ended the process it ran in"
        finally:
            self._idle.put_nowait(child)

    async def _replace(self, child: Child) -> Child:
        await child.close()
        self._all.discard(child)
        return await self._start_child(len(self._all))

    async def _start_child(self, index: int) -> Child:
        references = {name: absolute(tool.fn) for name, tool in self._settings.tools.items()}
        child = await self._children.start(
            "rlcore_agent_loop.toolbox:Toolbox",
            references,
            self._settings.max_result_chars,
            name=f"tools {index}",
            deadline_s=START_S,
        )
        self._all.add(child)
        return child
