"""The tools of a run, and of one sample. However a call ends, the policy gets text."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.contracts.activity import TOOL, current_activity
from rlcore.contracts.children import Child, ChildPool, Children
from rlcore.errors import ChildError, ConfigError, nearest
from rlcore.types import Prompt, TrajectoryId
from rlcore_agent_loop.checks import absolute
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.calls import ToolCall
from rlcore_agent_loop.tools.mcp_source import McpServer
from rlcore_agent_loop.tools.schemas import typed
from rlcore_agent_loop.tools.sources import Functions, ToolSource

logger = logging.getLogger(__name__)

START_S = 60.0
"""Seconds allowed for a child to import tools and environment."""


class Tools:
    """All sources of tools, and the child processes they share with the environment."""

    def __init__(self, children: Children, settings: AgentLoopSettings) -> None:
        self._children, self._settings = children, settings
        self.stateful = ChildPool(self._start_child, settings.children)
        """Children for objects with the state of samples: tools' objects and environments."""
        self._functions = ChildPool(self._start_child, settings.children)
        self._sources: list[ToolSource] = [Functions(settings, self._functions, self.stateful)]
        limit, env = settings.max_result_chars, settings.env
        self._sources += [McpServer(name, server, limit, env) for name, server in settings.mcp.items()]
        self._owners: dict[str, ToolSource] = {}
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._described: Sequence[Mapping[str, Any]] = ()
        """Schemas of all tools described to the policy."""

    async def start(self, describe: bool) -> None:
        """Start the children and every source.

        ConfigError naming two sources that share a tool's name; PluginError or ChildError naming a failed import.
        """
        for source in self._sources:
            await source.start(describe)
            for name, schema in source.schemas().items():
                if name in self._owners:
                    raise ConfigError(
                        f"{source.name}: its tool '{name}' has the name of one of {self._owners[name].name}; needs one "
                        "tool for each name: rename one, or leave it out of the server's `tools`"
                    )
                self._owners[name], self._schemas[name] = source, schema
        self._described = [schema for schema in self._schemas.values() if schema]

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of all tools described to the policy."""
        return self._described

    async def close(self) -> None:
        """End what was started. Safe to call more than once."""
        await asyncio.gather(
            self.stateful.close(), self._functions.close(), *(source.close() for source in self._sources)
        )

    def open(self, sample: str, prompt: Prompt, row: TrajectoryId | None = None) -> "SampleTools":
        """The tools of one sample, `row` in the trace; ConfigError if its column names an unknown tool."""
        column = self._settings.tools_column
        chosen = prompt.columns.get(column) if column else None
        if chosen is None:
            return SampleTools(sample, prompt.columns, self._owners, self._described, row)
        names = self._names(f"plugins.agent_loop.tools_column: column '{column}' of prompt '{prompt.id}'", chosen)
        owners = {name: self._owners[name] for name in names}
        schemas = [self._schemas[name] for name in names if self._schemas[name]]
        return SampleTools(sample, prompt.columns, owners, schemas, row)

    def _names(self, who: str, chosen: Any) -> Sequence[str]:
        names = [chosen] if isinstance(chosen, str) else chosen
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{who} is {chosen!r:.80}; needs the name of a tool, or a list of names")
        for name in names:
            if name not in self._owners:
                raise ConfigError(f"{who} names the tool '{name}'; {nearest(name, list(self._owners))}")
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"{who} names the tool '{twice}' twice; needs each once")
        return names

    async def _start_child(self, index: int) -> Child:
        settings = self._settings
        return await self._children.start(
            "rlcore_agent_loop.tools.toolbox:Toolbox",
            {name: absolute(tool.fn) for name, tool in settings.tools.items()},
            absolute(settings.environment.fn) if settings.environment.fn else "",
            dict(settings.environment.kwargs),
            name=f"tools {index}",
            deadline_s=START_S,
            env=settings.env,
        )


class SampleTools:
    """The tools that one sample may call."""

    def __init__(
        self,
        sample: str,
        columns: Mapping[str, Any],
        owners: Mapping[str, ToolSource],
        schemas: Sequence[Mapping[str, Any]],
        row: TrajectoryId | None = None,
    ) -> None:
        self._row, self._sample, self._columns, self._owners = row, sample, columns, owners
        self.schemas = schemas
        self.num_calls = 0
        self.num_errors = 0

    async def results(self, calls: Sequence[ToolCall], max_calls: int, max_chars: int) -> list[str]:
        """One text per call. Calls run concurrently; the text of a failed call begins with 'error: '."""
        made = [self._result(call, max_chars) for call in calls[:max_calls]]
        over = [self._failed(f"more than {max_calls} calls in one turn", max_chars) for _ in calls[max_calls:]]
        self.num_calls += len(calls)
        # One call does not need a separate task.
        results = [await made[0]] if len(made) == 1 else await asyncio.gather(*made)
        return [*results, *over]

    async def _result(self, call: ToolCall, max_chars: int) -> str:
        if call.problem:
            return self._failed(call.problem, max_chars)
        if call.name not in self._owners:
            return self._failed(f"there is no tool '{call.name}'; {nearest(call.name, list(self._owners))}", max_chars)
        activity = current_activity()
        key = activity.begin(TOOL, call.name, sample=self._row)
        try:
            arguments = typed(call, self.schemas).arguments
            return await self._owners[call.name].call(call.name, self._sample, self._columns, arguments)
        except ChildError as error:
            return self._failed(str(error), max_chars)
        finally:
            activity.end(key)

    def _failed(self, problem: str, max_chars: int) -> str:
        self.num_errors += 1
        return f"error: {problem.encode(errors='replace').decode()[:max_chars]}"

    async def close(self) -> None:
        """Release the sample's objects when it has ended. Their errors are logged."""
        if not self.num_calls:
            return
        for source in dict.fromkeys(self._owners.values()):
            try:
                await source.release(self._sample)
            except ChildError as error:
                logger.warning("sample %s: %s", self._sample, error)
