"""Tools and environments that return and raise all that Python can: a result, or a sample that failed and says why."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import call, contents, says, talk
from rlcore_agent_loop.tools.toolbox import Toolbox

from rlcore.errors import ChildError
from rlcore.testing.rewards import make_prompt

TOOLS = """
import asyncio

async def add(a, b):
    return a + b

class Mute(Exception):
    def __str__(self):
        raise KeyError("mute")

class Leaves(SystemExit): ...
class Interrupts(KeyboardInterrupt): ...
class Bare(BaseException): ...
class Shy:
    def __str__(self):
        raise KeyError("shy")
    __repr__ = __str__

class Texty(str):
    def __len__(self):
        return 0
    def __str__(self):
        raise KeyError("texty")

def deep(depth=100_000):
    value = []
    for _ in range(depth):
        value = [value]
    return value

def circle():
    value = {}
    value["self"] = value
    return value

async def nothing():
    return None
async def no_parameters_taken(): ...
async def mutates(items):
    items.clear()
    return "cleared"
async def waits_for_ever():
    await asyncio.Event().wait()
async def of_itself():
    async def inner(): return "inner"
    made = inner()
    made.close()
    return made
async def streams():
    yield 1
"""
RAISED = (
    "KeyError('which')",
    "Mute()",
    "Leaves(0)",
    "SystemExit(0)",
    "Interrupts()",
    "KeyboardInterrupt()",
    "Bare('x')",
    "GeneratorExit()",
    "StopIteration()",
    "StopAsyncIteration()",
    "RecursionError()",
    "MemoryError()",
    "asyncio.CancelledError()",
    "asyncio.TimeoutError()",
    "BaseExceptionGroup('x', [SystemExit(0)])",
    "ExceptionGroup('x', [KeyError('y')])",
    "ValueError('\\x1b[2J[red]\\ud800\\n\\nsecond')",
    "ValueError('x' * 10_000_000)",
)
RETURNED = (
    "None",
    "float('nan')",
    "10**5000",
    "deep()",
    "circle()",
    "Shy()",
    "Texty('x')",
    "{1: 2, (3,): {4}}",
    "[float('inf')] * 3",
    "b'raw'",
    "object",
    "'\\x1b[2J[red]\\ud800'",
    "'x' * 10_000_000",
    "...",
)
LAST = {"nothing", "mutates", "waits_for_ever", "of_itself", "streams", "no_parameters_taken"}


def tools_of(directory: Path, name: str, body: str = "") -> AgentLoopSettings:
    file = directory / "tools.py"
    file.write_text(TOOLS + body)
    tools = {tool: ToolSettings(f"{file}:{tool}", deadline_s=0.2) for tool in (name, "add")}
    return AgentLoopSettings(describe_tools="never", tools=tools, children=1, max_result_chars=200)


def result_of(settings: AgentLoopSettings, attack: str) -> str:
    """The tool's message to the policy. The call after the attack works, and the sample ends as usual."""
    found = talk(says(attack, call("add", a=2, b=3), "Done."), settings).only
    result, good = [content for role, content in contents(found) if role == "tool"]
    assert (good, found.info["ended_by"]) == ("5", "stop")
    result.encode()
    return result


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("raised", RAISED)
def test_the_exception_of_a_tool_becomes_a_result_that_is_an_error(tmp_path: Path, raised: str, kind: str) -> None:
    result = result_of(tools_of(tmp_path, "attack", f"{kind} attack():\n    raise {raised}\n"), call("attack"))
    assert result.startswith("error: ")
    assert len(result) < 300


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("returned", RETURNED)
def test_the_result_of_a_tool_becomes_text(tmp_path: Path, returned: str, kind: str) -> None:
    result = result_of(tools_of(tmp_path, "attack", f"{kind} attack():\n    return {returned}\n"), call("attack"))
    assert len(result) < 300, "cut at max_result_chars"


@pytest.mark.parametrize("name", sorted(LAST))
def test_tools_of_odd_kinds_have_short_results(tmp_path: Path, name: str) -> None:
    result = result_of(tools_of(tmp_path, name), call(name, items=[1]) if name != "nothing" else call(name))
    assert len(result) < 300


WORLD = """
import asyncio
from rlcore_agent_loop.conversation.environments import Environment, Step

class Interrupts(KeyboardInterrupt): ...
class Bare(BaseException): ...

class Traps(dict):
    def values(self):
        raise KeyError("trap")

def deep():
    found = []
    for _ in range(100_000):
        found = [found]
    return found

class World(Environment):
    def reset(self, prompt, seed):
        {reset}
        return prompt.messages

    async def step(self, messages):
        {step}
"""
STEPS = {
    "return None": "None",
    "return 3": "int",
    "return Step(done=True, reward=float('nan'))": "nan",
    "return Step(done=True, reward=float('inf'))": "inf",
    "return Step(done=True, reward='1')": "reward",
    "return Step(done=True, reward=10**400)": "reward=",
    "return Step(done='yes', reward=1.0)": "done",
    "raise SystemExit(0)": "sys.exit(0)",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise Interrupts": "Interrupts",
    "raise Bare('x')": "Bare",
    "raise GeneratorExit": "GeneratorExit",
    "raise asyncio.CancelledError": "CancelledError",
    "raise StopAsyncIteration": "StopAsyncIteration",
    "raise BaseExceptionGroup('x', [SystemExit(0)])": "x",
    "raise ValueError('\\x1b[2J[red]')": "ValueError",
    "await asyncio.Event().wait()": "took longer",
    "return Step(done=True), 1": "tuple",
    "return Step([{'role': 'user', 'content': 'x'}] * 10**6)": "returned 1000000 messages; needs at most",
    "return Step([{'role': 'user', 'content': 'x' * 10**8}])": "messages of more characters than plugins.agent_loop",
    "return Step([{'role': 'user', 'content': [['x'] * 10**6]}])": "max_chars=1000000",
    "return Step([{'role': 'user', 'x' * 10**7: 'x'}])": "max_chars=1000000",
    "return Step([{'role': 'user', 'content': deep()}])": "nested more than 32 deep",
    "return Step(done=True, info={'x': deep()})": "info of more characters",
    "return Step(done=True, info={'x': 'x' * 10**8})": "info of more characters",
    "return Step([Traps(role='user', content='x')])": "trap",
}


def world(directory: Path, step: str, reset: str = "pass") -> AgentLoopSettings:
    (directory / "world.py").write_text(WORLD.replace("{step}", step).replace("{reset}", reset))
    environment = EnvironmentSettings(f"{directory / 'world.py'}:World", deadline_s=0.3)
    return AgentLoopSettings(environment=environment, children=1, context_tokens=400)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_no_environment_may_take_fails_its_sample_in_one_line(tmp_path: Path, step: str) -> None:
    found = talk(says("one"), world(tmp_path, step)).only
    assert found.info["ended_by"] == "environment_failed"
    error = str(found.info["error"])
    assert STEPS[step] in error
    assert "\n" not in error


RESETS = {
    "return [{'role': 'user', 'content': 'x'}] * 10**6": "environment.reset returned 1000000 messages; needs at most",
    "return [{'role': 'user', 'content': 'x' * 10**8}]": "environment.reset returned messages of more characters",
}


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("reset", RESETS)
def test_an_opening_of_a_million_messages_fails_its_sample(tmp_path: Path, reset: str, kind: str) -> None:
    settings = world(tmp_path, "return Step(done=True)", reset)
    settings = replace(settings, environment=replace(settings.environment, deadline_s=10.0))
    file = tmp_path / "world.py"
    file.write_text(file.read_text().replace("async def step", f"{kind} step"))
    found = talk(says("one"), settings).only
    assert found.info["ended_by"] == "environment_failed"
    assert RESETS[reset] in str(found.info["error"])


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_million_messages_of_a_child_do_not_cross_the_pipe(tmp_path: Path, method: str) -> None:
    million = "[{'role': 'user'}] * 10**6"
    settings = world(tmp_path, f"return Step({million})", "pass" if method == "step" else f"return {million}")
    file = tmp_path / "world.py"
    file.write_text(file.read_text().replace("async def step", "def step"))
    toolbox = Toolbox({}, settings.environment.fn, {})
    calls: dict[str, Callable[[], Any]] = {
        "reset": lambda: toolbox.reset("one", make_prompt(0), 0, 9, 999),
        "step": lambda: toolbox.step("one", [], 9, 999),
    }
    if method == "step":
        calls["reset"]()
    with pytest.raises(ChildError, match=f"environment.{method} returned 1000000 messages; needs at most"):
        calls[method]()


def test_as_many_messages_as_the_limit_says_are_taken(tmp_path: Path) -> None:
    settings = world(tmp_path, "return Step(done=True, reward=1.0)", "return [prompt.messages[0]] * 3")
    for limit, ended in ((3, "environment"), (2, "environment_failed")):
        limited = replace(settings, environment=replace(settings.environment, max_messages=limit))
        assert talk(says("one"), limited).only.info["ended_by"] == ended


@pytest.mark.parametrize("reset", ["prompt.messages[0]['content'] = 'other'", "prompt.columns['start'] = 9"])
def test_an_environment_that_changes_its_prompt_changes_no_other_sample(tmp_path: Path, reset: str) -> None:
    found = talk(says("one"), world(tmp_path, "return Step(done=True, reward=1.0)", reset), num_samples=2).trajectories
    assert len({tuple(result.token_ids.tolist()) for result in found}) == 1
    assert found[0].prompt.messages[0]["content"] != "other"
