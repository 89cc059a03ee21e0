"""Servers of the Model Context Protocol that end in part, forget sessions, or answer in unusual ways."""

import asyncio
import gzip
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, McpSettings
from rlcore_agent_loop.testing import call, contents, says, talk
from rlcore_agent_loop.tools import mcp_relay
from rlcore_agent_loop.tools.mcp_source import McpServer

from rlcore.errors import ChildError

pytestmark = pytest.mark.fault

SERVER = """
import json, os, subprocess, sys, time

TOOL = {"name": "first", "inputSchema": {"type": "object", "properties": {}}}
calls = 0
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params") or {}
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if method == "initialize":
        answer["result"] = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        answer["result"]["serverInfo"] = {"name": "odd", "version": "1"}
    elif method == "tools/list":
        answer["result"] = {"tools": [TOOL]}
    elif method == "tools/call":
        calls += 1
        text = f"call {calls} of {json.dumps(params['arguments'])}"
        answer["result"] = {"content": [{"type": "text", "text": text}]}
        if sys.argv[1] == "structured":
            answer["result"] = {"content": [], "structuredContent": {"sum": 5}}
        elif sys.argv[1] == "own error":
            del answer["result"]
            answer["error"] = {"code": -32000, "message": f"it is full at call {calls}"}
        elif sys.argv[1] == "closes its output":
            os.close(1)
            sys.stdin.read()
            break
        elif sys.argv[1] == "leaves a process":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
            os._exit(3)
    else:
        answer["error"] = {"code": -32601, "message": "no"}
    print(json.dumps(answer), flush=True)
"""


def results(directory: Path, mode: str, *turns: str) -> list[str]:
    """The results of the calls in these turns, as the policy gets them."""
    pytest.importorskip("mcp")
    (directory / "server.py").write_text(SERVER)
    command = (sys.executable, str(directory / "server.py"), mode)
    settings = AgentLoopSettings(max_turns=9, mcp={"odd": McpSettings(command=command, deadline_s=20)})
    found = talk(says(*turns, "Done."), settings).only
    return [text for role, text in contents(found) if role == "tool"]


def test_an_argument_that_cannot_be_encoded_leaves_the_server_alive(tmp_path: Path) -> None:
    calls = [
        f'<tool_call>{{"name": "first", "arguments": {arguments}}}</tool_call>'
        for arguments in (r'{"a": "\ud800"}', r'{"a": [{"\ud800": 1}]}', f'{{"a": {"[" * 900 + "]" * 900}}}', "{}")
    ]
    first, second, deep, last = results(tmp_path, "plain", *calls)
    assert (first, second, last) == ('call 1 of {"a": "?"}', 'call 2 of {"a": [{"?": 1}]}', "call 3 of {}")
    assert deep.startswith("error: first: RecursionError")


def test_an_error_of_a_server_with_the_code_of_a_closed_connection_does_not_restart_it(tmp_path: Path) -> None:
    found = results(tmp_path, "own error", call("first"), call("first"))
    assert found == [f"error: first: MCPError: it is full at call {number}" for number in (1, 2)]


@pytest.mark.parametrize("mode", ["closes its output", "leaves a process"])
def test_a_server_that_can_answer_no_more_has_ended(
    tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    [found] = results(tmp_path, mode, call("first"))
    assert found == "error: first: the server has ended: Connection closed"
    assert caplog.text.count("restarting it") == 1


STUBBORN = """
import contextlib, os, signal, time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
    with contextlib.suppress(OSError):
        QUIET or os.write(1, b"x" * 1000 + b"\\n")
"""
LEAVING_RUN = """
import subprocess, sys

pipe = subprocess.PIPE
server = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=pipe, stdout=pipe, start_new_session=True)
print(server.stdout.readline().decode())
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_a_server_that_ignores_its_end_does_not_outlive_the_run(tmp_path: Path, quiet: bool) -> None:
    (tmp_path / "server.py").write_text(STUBBORN.replace("QUIET", str(quiet)))
    words = [sys.executable, "-c", LEAVING_RUN, mcp_relay.__file__, sys.executable, str(tmp_path / "server.py")]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = int(subprocess.run(words, check=True, timeout=60, **outputs).stdout)
    try:
        handle = os.pidfd_open(server)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 30.0)[0], "it still lives"
    finally:
        os.close(handle)
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def test_a_result_that_is_only_structured_is_json(tmp_path: Path) -> None:
    assert results(tmp_path, "structured", call("first")) == ['{"sum": 5}']


class Sessions(BaseHTTPRequestHandler):
    """A server with sessions over HTTP, in the protocol of most servers."""

    protocol_version = "HTTP/1.1"
    known: set[str]
    num = 0
    drops = 0
    """Calls that get no answer, because the connection is closed."""
    length = 0
    """Further characters of a result."""
    compresses = has_events = False

    def log_message(self, *arguments: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """Answers 404, as servers without a stream of messages do."""
        self._answer(404)

    def do_DELETE(self) -> None:
        """The client leaves."""
        self._answer(200)

    def do_POST(self) -> None:
        """Answer a message."""
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, server = message.get("method"), type(self)
        answer, session = {"jsonrpc": "2.0", "id": message.get("id")}, ""
        if method == "initialize":
            server.num += 1
            server.known.add(session := f"session {server.num}")
            about = {"serverInfo": {"name": "odd", "version": "1"}, "capabilities": {"tools": {}}}
            answer["result"] = {"protocolVersion": message["params"]["protocolVersion"], **about}
        elif (mine := self.headers["mcp-session-id"]) not in server.known:
            error = {"code": -32601 if mine is None else -32001, "message": "no" if mine is None else "unknown session"}
            return self._answer(404, {**answer, "error": error})
        elif method == "tools/list":
            answer["result"] = {"tools": [{"name": "first", "inputSchema": {"type": "object", "properties": {}}}]}
        elif method == "tools/call" and server.drops:
            server.drops -= 1
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        else:
            answer["result"] = {"content": [{"type": "text", "text": str(mine) + " " * server.length}]}
        return self._answer(200, answer, session) if "id" in message else self._answer(202)

    def _answer(self, status: int, body: Any = None, session: str = "") -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        has_events = type(self).has_events and body is not None and status == 200
        data = b"event: message\ndata: %b\n\n" % data if has_events else data
        self.send_header(
            "content-type", "text/event-stream" if has_events else "application/json; not=text/event-stream"
        )
        if type(self).compresses:
            data = gzip.compress(data)
            self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(data)))
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def with_sessions() -> Iterator[tuple[type[Sessions], str]]:
    """(the class of the server, with its sessions; the address where it listens)."""
    kind = type("Own", (Sessions,), {"known": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        server.daemon_threads, serving = True, threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield kind, f"http://127.0.0.1:{server.server_address[1]}/mcp"
        finally:
            server.shutdown()
            serving.join()


def outcomes(change: Callable[[type[Sessions]], None]) -> list[str]:
    """Results and errors of four calls over HTTP, three of them after a `change` of the server."""
    pytest.importorskip("mcp")

    async def run(kind: type[Sessions], url: str) -> list[str]:
        tools = McpServer("sums", McpSettings(url=url, deadline_s=20), 100)
        await tools.start(describe=True)

        async def called() -> str:
            try:
                return await tools.call("first", "sample", {}, {})
            except ChildError as error:
                return f"error: {error}"

        try:
            before = await called()
            change(kind)
            return [before, await called(), await called(), await called()]
        finally:
            await tools.close()

    with with_sessions() as (kind, url):
        return asyncio.run(run(kind, url))


def test_a_server_that_has_forgotten_the_session_gets_a_new_one() -> None:
    """It was restarted, or the session was idle for too long."""
    assert outcomes(lambda kind: kind.known.clear()) == ["session 1", "session 2", "session 2", "session 2"]


@pytest.mark.parametrize("has_events", [False, True])
def test_an_answer_over_http_that_is_too_long_or_compressed_fails_its_call(has_events: bool) -> None:
    def change(length: int, compresses: bool) -> Callable[[type[Sessions]], None]:
        def changed(kind: type[Sessions]) -> None:
            kind.length, kind.compresses, kind.has_events = length, compresses, has_events

        return changed

    most = mcp_relay.MAX_LINE
    _, *fitting = outcomes(change(most - 1000, False))
    assert all(text.startswith("session 1  ") for text in fitting)
    _, *long = outcomes(change(most, False))
    assert all(text.startswith("error: first: ") and str(most) in text for text in long)
    if not has_events:
        assert all(text.endswith(f"the answer has more than {most} bytes") for text in long)
        _, *compressed = outcomes(change(10_000, True))
        assert all("the answer is compressed (gzip), although" in text for text in compressed)


def test_a_call_on_a_connection_that_is_just_ending_gets_a_new_one() -> None:
    """The connections of the second call, and of its retry, are lost."""
    first, lost, *others = outcomes(lambda kind: setattr(kind, "drops", 2))
    assert (first, lost) == ("session 1", "error: first: the server has ended: Connection closed")
    assert others == ["session 3", "session 3"]
