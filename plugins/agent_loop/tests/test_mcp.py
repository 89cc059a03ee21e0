"""Servers of the Model Context Protocol as sources of tools."""

import asyncio
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, McpSettings, ToolSettings
from rlcore_agent_loop.testing import call, contents, says, talk
from rlcore_agent_loop.tools import mcp_source
from rlcore_agent_loop.tools.mcp_source import McpServer

from rlcore.errors import ChildError, ConfigError

SERVER = """
from mcp.server import MCPServer

app = MCPServer("sums")

@app.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

@app.tool()
def fails() -> int:
    "Fails."
    raise KeyError("gone")

@app.tool()
def dies_once() -> str:
    "Ends the server, the first time."
    import os
    from pathlib import Path
    died = Path(__file__).with_name("died")
    if not died.exists():
        died.touch()
        os._exit(3)
    return "x" * 50

@app.tool()
def keys() -> str:
    "Names of variables."
    import os
    return ",".join(sorted(name for name in os.environ if name.endswith("_KEY")))

@app.tool()
async def hangs() -> int:
    "Hangs."
    import asyncio
    await asyncio.sleep(60)

app.run()
"""


ODD = """
import json, sys

TOOL = {"description": "", "inputSchema": {"type": "object", "properties": {}}}
DEEP = '{"a":' * 110 + "1" + "}" * 110
print("a banner \\x1b[31m", flush=True)
print("red \\x1b[31m words", file=sys.stderr, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked.get("method"), asked.get("params") or {}
    if "id" not in asked:
        continue
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "odd", "version": "1"}
    elif method == "tools/list" and sys.argv[1] == "deep":
        result = {"tools": [{"name": "deep", "inputSchema": {"type": "object", "properties": json.loads(DEEP)}}]}
    elif method == "tools/list" and sys.argv[1] == "wrong":
        result = {"tools": 5}
    elif method == "tools/list" and sys.argv[1] == "endless":
        result = {"tools": [TOOL | {"name": "first"}], "nextCursor": "more"}
    elif method == "tools/list":
        last = "cursor" in params
        result = {"tools": [TOOL | {"name": "second" if last else "first"}]} | ({} if last else {"nextCursor": "2"})
    elif method == "tools/call" and sys.argv[1] == "long line":
        while True:
            sys.stdout.write("x" * 65536)
    elif method == "tools/call":
        print("not JSON", flush=True)
        result = {"content": [{"type": "text", "text": ""}, {"type": "text", "text": params["name"]}]}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": {"code": -32601, "message": "no"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def odd_server(directory: Path, mode: str, deadline_s: float = 4.0) -> AgentLoopSettings:
    (directory / "odd.py").write_text(ODD)
    command = (sys.executable, str(directory / "odd.py"), mode)
    return AgentLoopSettings(
        describe_tools="template", mcp={"odd": McpSettings(command=command, deadline_s=deadline_s)}
    )


def server(directory: Path, **settings: Any) -> McpSettings:
    (directory / "server.py").write_text(SERVER)
    return McpSettings(command=(sys.executable, str(directory / "server.py")), deadline_s=4.0, **settings)


@pytest.mark.fault
def test_two_sources_of_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "tools.py").write_text("def add(a, b):\n    return a + b\n")
    tools = {"add": ToolSettings(f"{tmp_path / 'tools.py'}:add")}
    twice = AgentLoopSettings(describe_tools="never", tools=tools, mcp={"sums": server(tmp_path)}, children=1)
    with pytest.raises(
        ConfigError, match=r"mcp\.sums: its tool 'add' has the name of one of plugins\.agent_loop\.tools"
    ):
        talk(says("Done."), twice)


@pytest.mark.fault
def test_tools_of_an_mcp_server_answer_fail_and_are_bounded(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    settings = AgentLoopSettings(describe_tools="template", mcp={"sums": server(tmp_path)})
    policy = says(call("add", a=2, b=3) + call("fails") + call("hangs"), "Done.")
    found = talk(policy, settings).only
    added, failed, hung = [content for role, content in contents(found) if role == "tool"]
    assert added == "5"
    assert failed.startswith("error: fails: ")
    assert hung.startswith("error: hangs")
    assert '"name": "hangs"' in bytes(policy.requests[0].token_ids).decode()


@pytest.mark.fault
def test_an_mcp_server_gets_the_variables_that_are_named_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setenv("OUR_KEY", "1")
    monkeypatch.setenv("HER_KEY", "2")
    settings = AgentLoopSettings(mcp={"sums": server(tmp_path)}, env=("OUR_KEY", "NO_KEY"))
    assert contents(talk(says(call("keys"), "Done."), settings).only)[1] == ("tool", "OUR_KEY")


@pytest.mark.fault
def test_an_mcp_server_that_writes_a_line_without_an_end_is_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mcp")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with caplog.at_level("INFO", "rlcore"):
        found = talk(says(call("first"), "Done."), odd_server(tmp_path, "long line", 60.0)).only
    [(_, result), *_] = [content for content in contents(found) if content[0] == "tool"]
    assert result.startswith("error: first: the server has ended")
    assert caplog.text.count("a line of more than 4194304 bytes: the server is ended") == 2  # it is restarted once
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.fault
def test_an_mcp_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    settings = AgentLoopSettings(mcp={"gone": McpSettings(command=("/nowhere/server",))}, describe_tools="never")
    with pytest.raises(ConfigError, match=r"plugins\.agent_loop\.mcp\.gone: "):
        talk(says("Done."), settings)


@pytest.mark.fault
def test_an_mcp_server_that_ends_is_restarted_and_its_calls_are_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mcp")
    settings = AgentLoopSettings(describe_tools="never", mcp={"sums": server(tmp_path, max_result_chars=10)})
    policy = says(call("dies_once"), call("add", a=2, b=3), "Done.")
    assert [text for role, text in contents(talk(policy, settings).only) if role == "tool"] == [
        "x" * 10 + " ... (40 characters cut off)",
        "5",
    ]
    assert "plugins.agent_loop.mcp.sums: the server has ended (dies_once: the server has ended: " in caplog.text


@pytest.mark.fault
def test_an_mcp_server_that_does_not_restart_is_reported_as_gone(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    settings = AgentLoopSettings(describe_tools="never", mcp={"sums": server(tmp_path)})
    file = tmp_path / "server.py"
    once = "from pathlib import Path\nassert not Path(__file__).with_name('died').exists()\n"
    file.write_text(once + file.read_text())
    policy = says(call("dies_once"), call("add", a=2, b=3), "Done.")
    results = [text for role, text in contents(talk(policy, settings).only) if role == "tool"]
    gone = "the server has ended, and did not start again: plugins.agent_loop.mcp.sums: "
    assert [gone in text for text in results] == [True, True]


def listening(directory: Path, port: int) -> "subprocess.Popen[bytes]":
    """The server of `server`, over HTTP, once it listens."""
    (directory / "listening.py").write_text(
        SERVER.replace("app.run()", f'app.run(transport="streamable-http", port={port})')
    )
    process = subprocess.Popen([sys.executable, str(directory / "listening.py")], stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        assert process.poll() is None
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process
        time.sleep(0.05)
    raise AssertionError("it does not listen")


@pytest.mark.fault
def test_a_server_at_a_url_that_was_away_for_a_while_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    monkeypatch.setattr(mcp_source, "REST_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tools = McpServer("sums", McpSettings(url=f"http://127.0.0.1:{port}/mcp", deadline_s=10), 100)

    async def add() -> str:
        try:
            return await tools.call("add", "sample", {}, {"a": 2, "b": 3})
        except ChildError as error:
            return str(error)

    async def run() -> None:
        process = listening(tmp_path, port)
        await tools.start(describe=True)
        try:
            assert await add() == "5"
            process.kill()
            process.wait()
            assert "the server has ended, and did not start again" in await add()
            monkeypatch.setattr(mcp_source, "REST_S", 600.0)
            assert "the server has ended, and did not start again" in await add()
            process = listening(tmp_path, port)
            assert "the server has ended, and did not start again" in await add(), "not while it is left alone"
            tools._rests_until = 0.0
            assert [await add(), await add()] == ["5", "5"]
        finally:
            await tools.close()
            process.kill()
            process.wait()

    asyncio.run(run())


@pytest.mark.fault
def test_what_a_server_writes_to_standard_error_goes_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mcp")
    with caplog.at_level("INFO"):
        talk(says(call("first"), "Done."), odd_server(tmp_path, "plain"))
    assert capfd.readouterr() == ("", "")
    assert "plugins.agent_loop.mcp.odd: red \x1b[31m words" in caplog.messages
    assert "Failed to parse JSONRPC message from server: ValidationError" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.fault
def test_tools_on_all_pages_of_a_servers_list_are_known_and_an_empty_text_is_empty(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    found = talk(says(call("second"), "Done."), odd_server(tmp_path, "plain")).only
    assert [text for role, text in contents(found) if role == "tool"] == ["\nsecond"]


@pytest.mark.fault
@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("deep", "mcp.odd: the schema of its tool 'deep' is nested more than 100 levels deep"),
        ("endless", "mcp.odd: the server's list of tools has more than 100 pages"),
        ("wrong", "mcp.odd: ValidationError: "),
    ],
)
def test_a_list_of_tools_that_cannot_be_used_is_an_error_of_one_line(tmp_path: Path, mode: str, why: str) -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match=why) as caught:
        talk(says("Done."), odd_server(tmp_path, mode))
    assert "\n" not in str(caught.value)
