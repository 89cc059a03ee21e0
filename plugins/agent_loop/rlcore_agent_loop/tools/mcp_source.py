"""Tools of a server that speaks the Model Context Protocol, through the official package `mcp`."""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from rlcore.errors import ChildError, ConfigError, RlcoreError, boundary, nearest
from rlcore_agent_loop.settings import McpSettings
from rlcore_agent_loop.tools.calls import as_text
from rlcore_agent_loop.tools.sources import ToolSource, within

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds allowed for a server to shut down."""

CONNECTION_CLOSED = -32000
"""The package's error code for a closed connection."""


class _Closed(ChildError):
    """The server has ended."""


class McpServer(ToolSource):
    """One server, which starts and ends with the run."""

    def __init__(self, name: str, settings: McpSettings, max_result_chars: int) -> None:
        self.name = f"plugins.agent_loop.mcp.{name}"
        self._settings, self._max_chars = settings, settings.max_result_chars or max_result_chars
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._client: Any = None
        self._ready: asyncio.Future[None] | None = None
        self._ending = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()
        self._gone = ""
        """Reason why it is not restarted; empty while it may be."""

    async def start(self, describe: bool) -> None:
        """Start the server and list its tools; ConfigError when it does not start or lacks a tool."""
        self._ending = asyncio.Event()
        self._ready = asyncio.get_running_loop().create_future()
        # The package's contexts must be exited by the task that entered them.
        self._serving = asyncio.create_task(self._serve(self._ready), name=self.name)
        try:
            async with asyncio.timeout(self._settings.start_s):
                await asyncio.shield(self._ready)
        except TimeoutError as cause:
            raise ConfigError(f"{self.name}: the server was not ready within {self._settings.start_s:g} s") from cause

    async def _serve(self, ready: "asyncio.Future[None]") -> None:
        try:
            with boundary(self.name, ConfigError):
                async with self._connect() as client:
                    self._schemas = self._chosen((await client.list_tools()).tools)
                    self._client = client
                    ready.set_result(None)
                    await self._ending.wait()
        except RlcoreError as error:
            if ready.done():
                self._client = None  # calls then fail, saying that the server is gone
            else:
                ready.set_exception(error)
        finally:
            self._client = None

    def _connect(self) -> Any:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as cause:
            raise ConfigError(
                f"{self.name}: the package mcp is not installed; pip install 'rlcore-agent-loop[mcp]'"
            ) from cause
        if self._settings.url:
            return Client(self._settings.url)
        program, *arguments = self._settings.command
        return Client(StdioServerParameters(command=program, args=arguments, cwd=os.getcwd()))

    def _chosen(self, tools: Any) -> dict[str, Mapping[str, Any]]:
        schemas = {
            tool.name: {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.input_schema),
                },
            }
            for tool in tools
        }
        for name in self._settings.tools:
            if name not in schemas:
                raise ConfigError(f"{self.name}.tools: the server has no '{name}'; {nearest(name, list(schemas))}")
        return {name: schemas[name] for name in self._settings.tools or schemas}

    async def _restart(self, client: Any, error: ChildError) -> None:
        """Restart the server, unless another call has since `client` failed. After one failed start, never again."""
        async with self._restarting:
            if self._client is not client or self._gone:
                return
            logger.warning("%s: the server has ended (%s); restarting it", self.name, error)
            await self.close()
            try:
                await self.start(describe=False)
            except RlcoreError as cause:
                self._gone = f"the server has ended, and did not start again: {cause}"
                await self.close()

    async def close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._ending.set()
        done, _ = await asyncio.wait([serving], timeout=CLOSE_S)
        if not done:
            serving.cancel()
            await asyncio.wait([serving], timeout=CLOSE_S)
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()

    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return self._schemas

    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """The text of the result; other contents by their kind.

        A call that finds or causes the server's end is retried once, after a restart.
        """
        client = self._client
        try:
            result = await self._called(client, name, arguments)
        except _Closed as error:
            await self._restart(client, error)
            result = await self._called(self._client, name, arguments)
        parts = [getattr(part, "text", None) or f"({part.type} left out)" for part in result.content]
        text = as_text("\n".join(parts), self._max_chars)
        if result.is_error:
            raise ChildError(f"{name}: {text}")
        return text

    async def _called(self, client: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        if client is None:
            raise _Closed(f"{name}: {self._gone or 'the server has ended'}")
        try:
            return await within(name, self._settings.deadline_s, client.call_tool(name, dict(arguments)))
        except ChildError as error:
            if getattr(error.__cause__, "code", None) == CONNECTION_CLOSED:
                raise _Closed(f"{name}: the server has ended: {error.__cause__}") from error
            raise
