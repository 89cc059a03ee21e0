"""Tools and calls that misbehave in less usual ways: each is a result or a line, and never the end of the run."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.agents.messages import answer
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import call, contents, loop_of, says, talk
from rlcore_agent_loop.tools.parsers import hermes

from rlcore.contracts.agents import RolloutTask
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.testing import ByteTokens, open_children
from rlcore.testing.rewards import make_prompt
from rlcore.types import Lane, Sampling

TOOLS = """
import asyncio

def add(a, b):
    return a + b

async def exits():
    raise SystemExit(3)

async def long():
    return "x" * 1_000_000

async def raw():
    return b"raw"

async def goes_on():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "late"

def generates():
    yield 1

class NotMade:
    def create(self, columns):
        raise KeyError("gone")

    def execute(self):
        return "made"

class NotMadeHere(NotMade):
    async def execute(self):
        return "made"

class NotReleased:
    def execute(self):
        return "made"

    def release(self):
        raise KeyError("gone")

class NotReleasedHere(NotReleased):
    async def execute(self):
        return "made"

async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(600)

async def stays():
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        await asyncio.sleep(600)
"""
RESULTS = {
    "cancels_itself": "error: cancels_itself: it cancelled itself",
    "exits": "error: exits: it called sys.exit(3)",
    "long": "x" * 40 + " ... (999960 characters cut off)",
    "raw": "error: the result is not text: bytes",
    "goes_on": "late",
    "generates": "error: the result is not text: generator",
    "NotMade": "error: KeyError: 'gone'",
    "NotMadeHere": "error: NotMadeHere: KeyError: 'gone'",
    "NotReleased": "made",
    "NotReleasedHere": "made",
}


def settings_of(directory: Path, *names: str, **settings: Any) -> AgentLoopSettings:
    file = directory / "tools.py"
    file.write_text(TOOLS)
    tools = {name: ToolSettings(f"{file}:{name}", deadline_s=0.1) for name in (*names, "add")}
    return AgentLoopSettings(describe_tools="never", tools=tools, children=1, max_result_chars=40, **settings)


@pytest.mark.parametrize("name", RESULTS)
def test_the_policy_sees_the_result_of_any_bad_tool_and_the_next_call_works(name: str, tmp_path: Path) -> None:
    found = talk(says(call(name), call("add", a=2, b=3), "Done."), settings_of(tmp_path, name)).only
    result, good = [content for role, content in contents(found) if role == "tool"]
    assert result.startswith(RESULTS[name][:40])
    assert len(result) <= 40 + len(" ... (999960 characters cut off)")
    assert (good, found.info["ended_by"]) == ("5", "stop")


@pytest.mark.slow
def test_a_tool_that_ignores_its_cancellation_holds_up_neither_its_sample_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talked = settings_of(tmp_path, "stays")

    async def main() -> list[str]:
        async with open_children(False) as children:
            loop = loop_of(says(call("stays") + call("add", a=2, b=3), "Done."), talked, ByteTokens(), children)
            try:
                await loop.start()
                rollout = loop.rollout([RolloutTask(make_prompt(0), 0, 1, 7)], Sampling(max_tokens=900), Lane.TRAIN)
                return [text async for found in rollout for role, text in contents(found) if role == "tool"]
            finally:
                await loop.close()

    with caplog.at_level("WARNING", "rlcore_agent_loop"):
        assert asyncio.run(main()) == ["error: stays took longer than 0.1 s", "5"]
    assert "stays is left behind, because it ignores its cancellation" in caplog.text


def test_a_column_that_names_a_tool_twice_is_an_error(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, tools_column="uses")
    with pytest.raises(ConfigError, match=r"column 'uses' of prompt 'test/0' names the tool 'add' twice; needs each"):
        talk(says("Done."), settings, prompts=[make_prompt(0, uses=["add", "add"])])


def test_a_configuration_that_names_a_tool_twice_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    tool = '      add: {fn: "tools.py:add"}\n'
    file.write_text(f"plugins:\n  agent_loop:\n    tools:\n{tool}{tool}")
    with pytest.raises(ConfigError, match=r"line 5, column 7: found duplicate key add"):
        plan_run([file], [])


@pytest.mark.parametrize("bad", ["<tool_call>add(2, 3)</tool_call>", '<tool_call>{"name": "add", "argum</tool_call>'])
def test_an_agent_is_given_a_malformed_call_as_the_text_that_it_is(bad: str) -> None:
    text = call("add", a=1) + bad
    assert answer(text, hermes(text), 1) == {"role": "assistant", "content": text}
