"""Tools and environments that fail each sample, or whose method nothing would call: refused at the start."""

from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import call, contents, says, talk

from rlcore.errors import ChildError

CLASSES = """
from pathlib import Path

from rlcore_agent_loop.conversation.environments import Environment, Step

class Game(Environment):
    def step(self, messages):
        return Step(done=True, reward=1.0)

class Misspelled(Game):
    def rest(self, prompt, seed):
        return [{"role": "user", "content": "never called"}]

class WithoutStep:
    def reset(self, prompt, seed):
        return prompt.messages

class OldReset(Game):
    def reset(self):
        return []

class NeedsLevel(Game):
    def __init__(self, level):
        self.level = level

game = Game()

def made(level):
    return NeedsLevel(level)

class Yields(Environment):
    def step(self, messages):
        yield Step(done=True)

class Prison(Game):
    def __init__(self, log):
        self.log = log

    def release(self):
        Path(self.log).write_text("prisoner")

    def close(self):
        Path(self.log).write_text("closed")

class Wrapped(Environment):
    def step(self, messages):
        async def answer():
            return Step(done=True, reward=1.0)
        return answer()

class Tool:
    def execute(self, by):
        return by

class Relaese(Tool):
    def relaese(self):
        pass

class WithoutExecute:
    def create(self, columns):
        pass

class CreateOfNothing(Tool):
    def create(self):
        pass

tool = Tool()
"""
ENVIRONMENTS = {
    "Misspelled": "Misspelled: it defines rest(), which nothing calls, and not reset(); rename it",
    "WithoutStep": "WithoutStep: it does not define step",
    "OldReset": "OldReset: reset() takes (self), needs (self, prompt, seed): too many positional arguments",
    "NeedsLevel": "NeedsLevel: it cannot be made with the arguments (size): missing a required argument: 'level'",
    "Yields": "Yields: step() is a generator; needs a method that returns",
    "game": "found a value of the type Game; needs a class or a function",
}
TOOLS = {
    "Relaese": "Relaese: it defines relaese(), which nothing calls, and not release(); rename it",
    "WithoutExecute": "WithoutExecute: it does not define execute",
    "CreateOfNothing": "CreateOfNothing: create() takes (self), needs (self, columns): too many positional arguments",
    "tool": "found a value of the type Tool; needs a class or a function",
}


def environment(directory: Path, name: str, **kwargs: Any) -> AgentLoopSettings:
    (directory / "classes.py").write_text(CLASSES)
    target = EnvironmentSettings(f"{directory / 'classes.py'}:{name}", kwargs=kwargs)
    return AgentLoopSettings(environment=target, children=1)


def tools(directory: Path, name: str) -> AgentLoopSettings:
    (directory / "classes.py").write_text(CLASSES)
    target = ToolSettings(f"{directory / 'classes.py'}:{name}")
    return AgentLoopSettings(tools={"by": target}, describe_tools="never", children=1)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_that_no_sample_could_use_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    kwargs = {"size": 3} if name == "NeedsLevel" else {}
    with pytest.raises(ChildError) as error:
        talk(says("one"), environment(tmp_path, name, **kwargs))
    assert str(error.value).startswith(f"plugins.agent_loop.environment.fn: {ENVIRONMENTS[name]}")


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_no_call_could_use_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    with pytest.raises(ChildError) as error:
        talk(says("one"), tools(tmp_path, name))
    assert str(error.value).startswith(f"plugins.agent_loop.tools.by.fn: {TOOLS[name]}")


@pytest.mark.parametrize(("name", "kwargs"), [("Game", {}), ("NeedsLevel", {"level": 1}), ("made", {"level": 1})])
def test_classes_and_functions_that_make_an_environment_are_used(
    name: str, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    assert talk(says("one"), environment(tmp_path, name, **kwargs)).only.info["environment_reward"] == 1.0


def test_a_step_that_returns_a_coroutine_without_being_one_is_awaited(tmp_path: Path) -> None:
    assert talk(says("one"), environment(tmp_path, "Wrapped")).only.info["environment_reward"] == 1.0


def test_an_environment_is_closed_also_if_its_game_has_a_method_release(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert talk(says("one"), environment(tmp_path, "Prison", log=str(log))).only.info["environment_reward"] == 1.0
    assert log.read_text() == "closed"


def test_a_tool_that_is_a_class_is_used(tmp_path: Path) -> None:
    found = talk(says(call("by", by=2), "Done."), tools(tmp_path, "Tool")).only
    assert contents(found)[1] == ("tool", "2")
