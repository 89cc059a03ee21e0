"""Tools of a server that speaks the Model Context Protocol, through the official package `mcp`."""

import asyncio
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, TextIO

from rlcore.cluster.kit import WorkerOutput, lines, pipe_reader
from rlcore.errors import ChildError, ConfigError, RlcoreError, boundary, nearest
from rlcore_agent_loop.settings import McpSettings
from rlcore_agent_loop.tools import mcp_relay
from rlcore_agent_loop.tools.calls import as_text, encodable, is_deeper
from rlcore_agent_loop.tools.sources import ToolSource, within

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds allowed for a server to shut down."""

SENDING_S, READING_S = 30.0, 300.0
"""Timeouts of a connection to a URL, those of the package: to connect and send, and between two parts of an answer."""

CONNECTION_CLOSED = -32000
CLOSED = "Connection closed"
"""The package's error for a closed connection. Servers use its code for other errors, too."""

SESSION = "mcp-session-id"
"""Header of a request that belongs to a session."""

LOGGERS = ("client", "mcp.client.stdio", "mcp.client.streamable_http", "mcp.shared.jsonrpc_dispatcher")
"""The package's loggers of what servers send."""

REST_S = 5.0
"""Seconds between two attempts to reach a server at a URL that has ended."""

MAX_PAGES = 100
"""Most pages of a server's list of tools."""

MAX_DEPTH = 100
"""Most levels of a tool's schema."""


class _Closed(ChildError):
    """The server has ended."""


class _WithoutTracebacks(logging.Filter):
    """Makes one line of what the package logs about a message that it cannot read, and logs it to rlcore's log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.exc_info or not isinstance(record.exc_info[1], Exception):
            return True
        logger.info("a server's message: %s: %s", record.getMessage(), type(record.exc_info[1]).__name__)
        return False


_WITHOUT_TRACEBACKS = _WithoutTracebacks()


@asynccontextmanager
async def logged_output(name: str) -> AsyncIterator[TextIO]:
    """A file for a server's standard error: its lines go to the log, as those of workers do, not to the terminal."""
    reading, writing = os.pipe()
    reader, transport = await pipe_reader(os.fdopen(reading, "rb", 0))
    output = WorkerOutput(name)

    async def log() -> None:
        async for line in lines(reader):
            output.add(line, is_error=True)

    logging_lines = asyncio.create_task(log(), name=f"output of {name}")
    try:
        with os.fdopen(writing, "w") as file:
            yield file
    finally:
        transport.close()
        await logging_lines


@contextmanager
def _causes() -> Iterator[None]:
    """Raises an exception that the package has put into a group, which says nothing, by itself."""
    try:
        yield
    except ExceptionGroup as group:
        cause: Exception = group
        while isinstance(cause, ExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        raise cause from group


async def _answer(client: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    # text that cannot be encoded would end the connection, and with it the calls of other samples
    return await client.call_tool(name, encodable(arguments))


class McpServer(ToolSource):
    """One server, which starts and ends with the run."""

    def __init__(self, name: str, settings: McpSettings, max_result_chars: int, env: Sequence[str] = ()) -> None:
        """`env`: environment variables for a server that is started here, in addition to PATH, HOME and the like."""
        self.name = f"plugins.agent_loop.mcp.{name}"
        self._settings, self._max_chars = settings, settings.max_result_chars or max_result_chars
        self._env = env
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._client: Any = None
        self._ready: asyncio.Future[None] | None = None
        self._ending = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._restarting = asyncio.Lock()
        self._session_lost = False
        """True once a server at a URL no longer knows the session: it was restarted, or ended an idle session."""
        self._gone = ""
        """Reason why it is not restarted; empty while it may be."""
        self._rests_until = 0.0
        """Time until which a server at a URL is not connected to again: others may start it at any time."""

    async def start(self, describe: bool) -> None:
        """Start the server and list its tools; ConfigError when it does not start or lacks a tool."""
        self._ending, self._session_lost = asyncio.Event(), False
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
            with boundary(self.name, ConfigError), _causes():
                async with self._connect() as client:
                    self._schemas = self._chosen(await self._listed(client))
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

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        try:
            from httpx2 import AsyncClient, Timeout
            from mcp import Client, StdioServerParameters, stdio_client
            from mcp.client.streamable_http import streamable_http_client

            from rlcore_agent_loop.tools import mcp_answers
        except ImportError as cause:
            raise ConfigError(f"{self.name}: the package mcp is not installed; pip install mcp") from cause
        for name in LOGGERS:
            logging.getLogger(name).addFilter(_WITHOUT_TRACEBACKS)
        if self._settings.url:
            waits = Timeout(SENDING_S, read=READING_S)
            hooks = {"response": [self._answered, mcp_answers.bound]}
            http = AsyncClient(timeout=waits, headers=mcp_answers.ENCODING, event_hooks=hooks)
            connection = streamable_http_client(
                self._settings.url, http_client=http, max_sse_event_size=mcp_relay.MAX_LINE
            )
            async with http, Client(connection) as client:
                yield client
            return
        program = self._settings.command[0]
        if shutil.which(program) is None:
            raise ConfigError(f"{self.name}: found no program '{program}' to run; correct its `command`")
        arguments = ["-I", "-S", mcp_relay.__file__, *self._settings.command]
        named = {name: os.environ[name] for name in self._env if name in os.environ}
        command = StdioServerParameters(command=sys.executable, args=arguments, cwd=os.getcwd(), env=named)
        async with logged_output(self.name) as output, Client(stdio_client(command, output)) as client:
            yield client

    async def _answered(self, response: Any) -> None:
        """Find out from an answer over HTTP whether the server still knows the session."""
        request = response.request
        # a server without a stream of messages may answer its GET with 404, too
        if response.status_code == HTTPStatus.NOT_FOUND and request.method == "POST" and SESSION in request.headers:
            self._session_lost = True

    async def _listed(self, client: Any) -> list[Any]:
        """The tools on all pages of the server's list."""
        tools, page = [], await client.list_tools()
        for _ in range(MAX_PAGES):
            tools += page.tools
            if not page.next_cursor:
                return tools
            page = await client.list_tools(cursor=page.next_cursor)
        raise ConfigError(f"{self.name}: the server's list of tools has more than {MAX_PAGES} pages; needs fewer")

    def _chosen(self, tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
        for tool in tools:
            if is_deeper(tool.input_schema, MAX_DEPTH):
                raise ConfigError(
                    f"{self.name}: the schema of its tool '{tool.name}' is nested more than {MAX_DEPTH} levels deep; "
                    "needs fewer, or leave the tool out of the server's `tools`"
                )
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
        """Restart the server, unless another call has since `client` failed. After one failed start, never again, and
        connect to one at a URL again after a while."""
        async with self._restarting:
            is_restarted = self._client is not None and self._client is not client  # None: it has just ended
            if is_restarted or (self._gone and time.monotonic() < self._rests_until):
                return
            logger.warning("%s: the server has ended (%s); restarting it", self.name, error)
            await self.close()
            try:
                await self.start(describe=False)
                self._gone = ""
            except RlcoreError as cause:
                self._gone = f"the server has ended, and did not start again: {cause}"
                self._rests_until = time.monotonic() + REST_S if self._settings.url else math.inf
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
        """The text of the result; other contents by their kind. Without contents, the structured content as JSON.

        A call that finds or causes the server's end is retried once, after a restart.
        """
        client = self._client
        try:
            result = await self._called(client, name, arguments)
        except _Closed as error:
            await self._restart(client, error)
            result = await self._called(self._client, name, arguments)
        parts = [part.text if part.type == "text" else f"({part.type} left out)" for part in result.content]
        text = as_text("\n".join(parts) if parts else result.structured_content, self._max_chars)
        if result.is_error:
            raise ChildError(f"{name}: {text}")
        return text

    async def _called(self, client: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        if client is None:
            raise _Closed(f"{name}: {self._gone or 'the server has ended'}")
        try:
            return await within(name, self._settings.deadline_s, _answer(client, name, arguments))
        except ChildError as error:
            if self._session_lost or self._is_closed(error.__cause__):
                raise _Closed(f"{name}: the server has ended: {error.__cause__}") from error
            raise

    def _is_closed(self, cause: BaseException | None) -> bool:
        """True if the connection has ended. Over HTTP a connection costs little, so any error of that code counts."""
        return getattr(cause, "code", None) == CONNECTION_CLOSED and (bool(self._settings.url) or str(cause) == CLOSED)
