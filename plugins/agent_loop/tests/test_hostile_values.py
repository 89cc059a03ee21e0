"""Values of tools and environments whose classes raise when they are read: a result, or a sample that failed."""

import json
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.rewards import environment
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import call, contents, says, talk
from rlcore_agent_loop.tools.calls import check_size

from rlcore.errors import ChildError, RewardError
from rlcore.report.metrics import trajectory_lines
from rlcore.types import FrozenDict, Lane, Reward, ScoredTrajectory, Trajectory

VALUES = """
import collections.abc, itertools, os, sys
import numpy as np
from rlcore_agent_loop.conversation.environments import Environment, Step

def trap(self, *arguments):
    raise KeyError("trap")

class Text(str):
    __str__ = __repr__ = __format__ = __eq__ = encode = isascii = trap
    __hash__ = str.__hash__
    def __len__(self):
        return 0
    def __reduce__(self):
        return os._exit, (7,)

class Number(float):
    __float__ = __repr__ = __add__ = __radd__ = trap
    def __abs__(self):
        return 0.0

class Whole(int):
    __int__ = __repr__ = __str__ = __index__ = __float__ = trap

class Listed(list):
    __iter__ = __len__ = trap

class Unending(list):
    def __iter__(self):
        return itertools.repeat({"role": "user", "content": "x"})

class Mapped(dict):
    items = keys = __iter__ = trap

class Changing(collections.abc.Mapping):
    "It raises from the second look on."
    looks = 0
    def __getitem__(self, key):
        self.looks += 1
        return "x" if self.looks < 3 else trap(self)
    def __iter__(self):
        return iter(["role", "content"])
    def __len__(self):
        return 2

class Nameless(type):
    __name__ = property(trap)

class Odd(metaclass=Nameless):
    __str__ = __repr__ = __bool__ = trap

class Classless:
    __class__ = property(trap)

class Shifting(Step):
    "Its info is another one from the third look on."
    looks = 0
    def __getattribute__(self, name):
        if name == "info":
            Shifting.looks += 1
            return {} if Shifting.looks < 3 else "x"
        return super().__getattribute__(name)

def deep(depth=900):
    value = []
    for _ in range(depth):
        value = [value]
    return value

async def coroutine():
    return 1

async def add(a, b):
    return a + b
"""
RESULTS = {
    "'x' * 10_000_000": "xxxx",
    "['x' * 1000] * 10_000": '["xxxx',
    "'\\ud800\\udfff'": "??",
    "{'\\ud800': '\\udfff'}": '{"?": "?"}',
    "deep()": "[[[[",
    "deep(100_000)": "error: the result is not text: list",
    "[float('nan'), -float('inf')]": "[NaN, -Infinity]",
    "itertools.count()": "error: the result is not text: count",
    "Text('x')": "x",
    "{Text('a'): [Text('b')]}": '{"a": ["b"]}',
    "Whole(3)": "3",
    "Number(3)": "3.0",
    "10**5000": "error: the result is not text: int",
    "np.zeros(3)": "error: the result is not text: ndarray",
    "coroutine()": "error: the result is not text: coroutine (Object of type coroutine is not JSON serializable); "
    "needs an `async def` tool, which is awaited",
    "Mapped(a=1)": "error: ",
    "Listed([1])": "error: ",
    "Odd()": "error: ",
    "Classless()": "error: ",
}
STEPS = {
    "Step(done=True, reward=float('inf'))": "reward=inf; needs a finite number",
    "Step(done=True, reward=Number('inf'))": "needs a finite number",
    "Step(done=True, reward=10**400)": "needs a finite number",
    "Step(done=True, reward='1.0')": "reward='1.0'; needs a finite number",
    "Step(done=True, reward=np.array([1.0, 2.0]))": "needs a finite number",
    "Step(done=np.array([True, False]))": "done=array([ True, False]); needs True or False",
    "Step(done=Odd())": "environment.step: KeyError",
    "Step(say, restart=np.array([1, 0]))": "restart=array([1, 0]); needs True or False",
    "Step(say, restart=Odd())": "environment.step: KeyError",
    "Step(say, restart='no')": "restart='no'; needs True or False",
    "Step(np.zeros(3))": "ndarray as messages; needs a list",
    "Step({1, 2})": "set as messages; needs a list",
    "Step(Unending(say))": "max_chars",
    "Step(Listed(say))": "trap",
    "Step([Mapped(role='user', content='x')])": "trap",
    "Step([Changing()])": "environment.step",
    "Step([{'role': 'user', 'content': [np.zeros(10**7)]}])": "max_chars",
    "Step([{'role': 'user', 'content': [{1, 'x' * 10**7}]}])": "max_chars",
    "Step([{'role': 'user', 'content': [bytearray(10**7)]}])": "max_chars",
    "Step(done=True, info={'x': Text('y')})": "trap",
    "Step(done=True, info=Mapped(x=1))": "trap",
    "Step(done=True, info=Changing())": "trap",
    "Step(done=True, info={'x': Odd()})": "trap",
    "Step(done=True, info={'x': deep()})": "nested more than 32 deep",
    "('observation', 1.0, True, {})": "returned tuple; needs rlcore_agent_loop.Step",
    "Step": "returned type; needs rlcore_agent_loop.Step",
    "sys.exit(0)": "it called sys.exit(0)",
}
TAKEN = (
    "Step(say, done=np.True_, reward=np.float64(1.5))",
    "Step(say, done=True, reward=np.float32(1.5))",
    "Step(done=True, reward=1.5, info={'x': 10**5000, 'y': {1}, 3: b'z', 'n': float('nan'), 'a': np.array([1j])})",
    "Step(Odd(), done=True, reward=Number(1.5))",
    "Shifting(done=True, reward=1.5)",
)


def tool_results(directory: Path, returned: str, kind: str) -> list[str]:
    file = directory / "tools.py"
    file.write_text(f"{VALUES}\n{kind} attack():\n    return {returned}\n")
    tools = {name: ToolSettings(f"{file}:{name}", deadline_s=5.0) for name in ("attack", "add")}
    settings = AgentLoopSettings(describe_tools="never", tools=tools, children=1, max_result_chars=200)
    found = talk(says(call("attack"), call("add", a=2, b=3), "Done."), settings).only
    assert found.info["ended_by"] == "stop"
    return [content for role, content in contents(found) if role == "tool"]


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("returned", RESULTS)
def test_a_result_that_cannot_be_read_is_an_error_of_its_call(tmp_path: Path, returned: str, kind: str) -> None:
    result, good = tool_results(tmp_path, returned, kind)
    assert good == "5"
    assert type(result) is str
    assert result.startswith(RESULTS[returned])
    assert len(result) < 300
    result.encode()


def stepped(directory: Path, step: str, kind: str, first: str = "") -> Trajectory:
    """The sample of an environment whose answer is `step`, or `first` and then `step`."""
    file = directory / "world.py"
    file.write_text(
        f"{VALUES}\n"
        "say = [{'role': 'user', 'content': 'x'}]\n\n"
        "class World(Environment):\n"
        "    turns = 0\n\n"
        f"    {kind} step(self, messages):\n"
        "        self.turns += 1\n"
        f"        return {first or step} if self.turns == 1 else {step}\n"
    )
    settings = EnvironmentSettings(f"{file}:World", deadline_s=20.0)
    return talk(says("one", "two"), AgentLoopSettings(environment=settings, children=1, context_tokens=400)).only


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_cannot_be_read_fails_its_sample(tmp_path: Path, step: str, kind: str) -> None:
    found = stepped(tmp_path, step, kind)
    assert found.info["ended_by"] == "environment_failed"
    assert STEPS[step] in str(found.info["error"])
    with pytest.raises(RewardError, match="gave 0 and then failed"):
        environment(found)


@pytest.mark.parametrize("kind", ["async def", "def"])
@pytest.mark.parametrize("step", TAKEN)
def test_a_step_with_odd_values_is_taken_and_recorded_as_plain_ones(tmp_path: Path, step: str, kind: str) -> None:
    if step.startswith("Shifting") and kind == "def":
        pytest.skip("classes of tests do not cross from a child")
    found = stepped(tmp_path, step, kind)
    assert found.info["ended_by"] == "environment"
    assert (type(found.info["environment_reward"]), environment(found)) == (float, 1.5)
    scored = ScoredTrajectory(found, Reward(1.5, info=FrozenDict()))
    record = json.loads(trajectory_lines([(scored, None)], Lane.TRAIN))
    info = record["agent"].get("environment", {})
    if info:
        assert info == {"x": "an integer of 16610 bits", "y": "{1}", "3": "b'z'", "n": None, "a": ["1j"]}


def test_messages_of_an_environment_become_exact_texts(tmp_path: Path) -> None:
    found = stepped(
        tmp_path, "Step(done=True)", "async def", "Step([{'role': 'user', 'content': 'x', 'of': [10**5000], 1: b'x'}])"
    )
    message: Any = found.completion[1]
    assert json.loads(json.dumps(dict(message))) == {
        "role": "user",
        "content": "x",
        "of": ["an integer of 16610 bits"],
        "1": "b'x'",
    }


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_a_sample_whose_environment_fails_after_a_reward_has_no_reward(tmp_path: Path, kind: str) -> None:
    found = stepped(tmp_path, "Step(done=True, reward=1j)", kind, "Step(say, reward=0.5)")
    assert (found.info["ended_by"], found.info["environment_reward"]) == ("environment_failed", 0.5)
    with pytest.raises(RewardError, match=r"gave 0\.5 and then failed: environment\.step returned reward=1j"):
        environment(found)


def test_digits_of_a_large_integer_are_counted() -> None:
    check_size("step returned", [10**1000], None, 9, 2000)
    with pytest.raises(ChildError, match="more characters than"):
        check_size("step returned", [10**10000], None, 9, 2000)
