"""Children of tools, environments and agents inherit no API key that the configuration does not name."""

from pathlib import Path

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, contents, talk

CODE = """
import os


def keys():
    return ",".join(sorted(name for name in os.environ if name.endswith("_KEY") and name != "OPENAI_API_KEY"))


def program(base_url, api_key, messages):
    return keys()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("named", "found"), [((), ""), (("OUR_KEY",), "OUR_KEY"), (("OUR_KEY", "NO_KEY"), "OUR_KEY")])
def test_only_keys_that_are_named_get_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...], found: str
) -> None:
    monkeypatch.setenv("OUR_KEY", "1")
    monkeypatch.setenv("HER_KEY", "2")
    file = tmp_path / "code.py"
    file.write_text(CODE)
    policy = ScriptedPolicy(lambda sample, turn, ids: [*call("keys").encode(), END] if turn == 1 else [65, END])
    tools = AgentLoopSettings(
        describe_tools="never", env=named, children=1, tools={"keys": ToolSettings(f"{file}:keys", deadline_s=60.0)}
    )
    assert ("tool", found) in contents(talk(policy, tools, processes=True).only)
    agent = AgentLoopSettings(env=named, agent=AgentSettings(f"{file}:program", children=1))
    assert talk(policy, agent, processes=True).only.info["result"] == found
