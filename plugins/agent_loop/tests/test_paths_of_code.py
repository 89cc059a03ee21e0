"""Code that a configuration file names counts from its directory, then from the working directory."""

from pathlib import Path

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings

from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS


def test_tools_and_environments_count_from_the_directory_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task").mkdir()
    for path in ("task/tools.py", "tools.py", "guess.py"):
        (tmp_path / path).touch()
    (tmp_path / "task" / "config.yaml").write_text(
        "plugins: {agent_loop: {tools: {add: {fn: 'tools.py:add'}, root: {fn: 'math:sqrt'}}, "
        "environment: {fn: 'guess.py:Guess'}}}"
    )
    monkeypatch.chdir(tmp_path)
    loaded = configure([Path("task/config.yaml")], [*SETTINGS, "plugins.agent_loop.tools.sub.fn=tools.py:sub"])[1]
    section = loaded.config.plugins["agent_loop"]
    assert isinstance(section, AgentLoopSettings)
    assert {name: tool.fn for name, tool in section.tools.items()} == {
        "add": "task/tools.py:add",
        "root": "math:sqrt",
        "sub": "tools.py:sub",
    }
    assert section.environment.fn == "guess.py:Guess"
    assert loaded.saved["plugins"]["agent_loop"]["tools"]["add"]["fn"] == f"{tmp_path}/task/tools.py:add"
