"""Tools, parsers and columns that do the unexpected: a result or a line, never a hang or the end of the run."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, contents, says, talk
from rlcore_agent_loop.tools.schemas import schema_of
from rlcore_agent_loop.workers.admission import SampleLimit
from rlcore_agent_loop.workers.open_conversations import OpenConversations

from rlcore.contracts.agents import RolloutTask
from rlcore.errors import ConfigError, WorkerError
from rlcore.testing.rewards import make_prompt
from rlcore.types import Trajectory

TOOLS = """
import asyncio, os
from pathlib import Path

from rlcore_agent_loop.tools.calls import ToolCall

SHARED = {}

async def cancelled():
    raise asyncio.CancelledError

async def remembers(seconds: float):
    "One task for all who ask: a caller that is cancelled cancels it for the others."
    if "task" not in SHARED:
        SHARED["task"] = asyncio.create_task(asyncio.sleep(seconds))
    try:
        await SHARED["task"]
    finally:
        SHARED.pop("task", None)

def cancels():
    raise asyncio.CancelledError

def ends():
    os._exit(1)

def hangs():
    while True:
        pass

class Counter:
    def create(self, columns):
        self.total = 0

    def execute(self, by: int) -> int:
        '''Counts on.

        Args:
            by: How far.
        '''
        self.total += by
        return self.total

class Ends:
    def execute(self):
        os._exit(1)

class Inherits(Counter):
    pass

class Prepared:
    async def create(self, columns):
        await asyncio.sleep(0.01)
        self.start = columns["start"]

    async def execute(self):
        return self.start

    async def release(self):
        Path(__file__).with_name(f"prepared_{self.start}").touch()

class PreparedInChild(Prepared):
    def execute(self):
        return self.start

class NotReleased:
    def create(self, columns):
        pass

    async def execute(self):
        return "made"

    async def release(self):
        raise KeyError("gone")

class NotMade:
    tries = 0

    def create(self, columns):
        NotMade.tries += 1
        if NotMade.tries == 1:
            raise KeyError("not yet")

    def execute(self):
        return "made"

def parser_raises(text):
    raise KeyError(text)

def parser_says_nothing(text):
    return None

def parser_finds_names(text):
    return ["add"]

def parser_names_no_tool(text):
    return [ToolCall(None, {})]

def parser_lists_arguments(text):
    return [ToolCall("add", [1])]

def parser_numbers_arguments(text):
    return [ToolCall("add", {1: 2, "a": 3})]

def parser_finds_a_large_number(text):
    return [ToolCall("add", {"a": 10**5000})]

number = 3
"""


def settings_of(directory: Path, *names: str, deadline_s: float = 0.3, **settings: Any) -> AgentLoopSettings:
    file = directory / "tools.py"
    file.write_text(TOOLS)
    tools = {name: ToolSettings(f"{file}:{name}", deadline_s=deadline_s) for name in names}
    return replace(AgentLoopSettings(describe_tools="never", tools=tools, children=1), **settings)


def results_of(responses: tuple[str, ...], settings: AgentLoopSettings, processes: bool = False) -> list[str]:
    found = talk(says(*responses, "Done."), settings, processes=processes, prompts=[make_prompt(0, start=7)]).only
    return [content for role, content in contents(found) if role == "tool"]


def test_an_async_tool_that_lets_a_cancellation_out_is_a_result(tmp_path: Path) -> None:
    [result] = results_of((call("cancelled"),), settings_of(tmp_path, "cancelled"))
    assert result == "error: cancelled: CancelledError: something that it awaited was cancelled"


def test_a_task_that_several_calls_share_fails_them_all_when_the_first_runs_out_of_time(tmp_path: Path) -> None:
    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        return [
            *((call("cancelled") if sample == 0 else call("remembers", seconds=60)) if turn == 1 else "x").encode(),
            END,
        ]

    settings = settings_of(tmp_path, "remembers", "cancelled", deadline_s=0.1)
    found = talk(ScriptedPolicy(script), settings, num_samples=3).trajectories
    results = sorted(contents(result)[1][1] for result in found)
    assert len(found) == 3
    assert results[0].startswith("error: cancelled: CancelledError")
    assert all("took longer" in result or "CancelledError" in result for result in results[1:])


@pytest.mark.slow
def test_a_sync_tool_in_a_process_that_raises_a_cancellation_is_answered_and_the_process_stays(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "cancels", "Counter", deadline_s=20.0)
    assert results_of((call("Counter", by=1), call("cancels"), call("Counter", by=1)), settings, processes=True) == [
        "1", "error: CancelledError", "2",
    ]  # fmt: skip


@pytest.mark.fault
def test_an_object_that_was_never_made_was_not_lost_with_the_process_that_died(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "Ends", "Counter", deadline_s=20.0)
    responses = (call("Ends"), call("Counter", by=1), call("Counter", by=2))
    assert [message[:30] for message in results_of(responses, settings, processes=True)] == [
        "error: Ends ended the process ",
        "1",
        "3",
    ]


@pytest.mark.fault
def test_a_function_that_hangs_or_dies_takes_no_state_with_it(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "hangs", "ends", "Counter", deadline_s=0.5, max_turns=6)
    responses = (call("Counter", by=1), call("hangs"), call("ends"), call("Counter", by=1))
    assert [message[:30] for message in results_of(responses, settings, processes=True)] == [
        "1", "error: hangs took longer than ", "error: ends ended the process ", "2",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["Prepared", "PreparedInChild"])
def test_a_create_that_is_a_coroutine_is_awaited_once(name: str, tmp_path: Path) -> None:
    assert results_of((call(name) + call(name),), settings_of(tmp_path, name)) == ["7", "7"]
    assert (tmp_path / "prepared_7").exists()


def test_an_object_whose_create_failed_is_made_by_the_next_call(tmp_path: Path) -> None:
    first, second = results_of((call("NotMade"), call("NotMade")), settings_of(tmp_path, "NotMade"))
    assert (first, second) == ("error: KeyError: 'not yet'", "made")


def test_a_release_that_raises_keeps_no_other_object_from_its_release(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path, "NotReleased", "Prepared")
    assert results_of((call("NotReleased") + call("Prepared"),), settings) == ["made", "7"]
    assert (tmp_path / "prepared_7").exists()
    assert "NotReleased.release: KeyError: 'gone'" in caplog.text


def test_an_inherited_execute_has_a_schema_and_a_class_without_one_is_named(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__file__": "x"}
    exec(TOOLS, namespace)
    assert schema_of("count", namespace["Inherits"])["function"]["parameters"]["required"] == ["by"]
    with pytest.raises(ConfigError, match=r"tools\.n: its schema: AttributeError: .*has no attribute 'execute'"):
        schema_of("n", Path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("parser_raises", "KeyError: 'x'"),
        ("parser_says_nothing", "TypeError: 'NoneType' object is not iterable"),
        ("parser_finds_names", "returned str; needs rlcore_agent_loop.ToolCall"),
        ("parser_names_no_tool", "returned a ToolCall of None with {}; needs a name, and arguments by name"),
        ("parser_lists_arguments", "returned a ToolCall of 'add' with [1]; needs a name, and arguments by name"),
        ("parser_numbers_arguments", "returned a ToolCall of 'add' with {1: 2, 'a': 3}; needs a name"),
        ("parser_finds_a_large_number", "ValueError: Exceeds the limit"),
    ],
)
def test_a_parser_that_fails_is_a_call_that_cannot_be_made(name: str, why: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "Counter", parser=f"{tmp_path / 'tools.py'}:{name}", max_turns=2)
    found = talk(says("x", "x"), settings).only
    [result] = [content for role, content in contents(found) if role == "tool"]
    assert result.startswith("error: the parser ")
    assert why in result
    assert (found.turns, found.info["num_call_errors"]) == (2, 1)


@pytest.mark.parametrize(("name", "why"), [("number", "is int; needs a function"), ("gone", "there is no 'gone'")])
def test_a_parser_that_is_not_a_function_is_an_error_at_the_start(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=why) as caught:
        talk(says("x"), settings_of(tmp_path, "Counter", parser=f"{tmp_path / 'tools.py'}:{name}"))
    assert type(caught.value).__module__ == "rlcore.errors"


def test_turns_without_a_call_make_the_same_call_another_one(tmp_path: Path) -> None:
    (tmp_path / "worlds.py").write_text(
        "from rlcore_agent_loop.conversation.environments import Environment, Step\n"
        "class Asks(Environment):\n"
        "    def step(self, messages):\n"
        "        return Step([{'role': 'user', 'content': 'go on'}])\n"
    )
    settings = settings_of(tmp_path, "Counter", max_turns=7, max_same_calls=1)
    asks = replace(settings, environment=replace(settings.environment, fn=f"{tmp_path / 'worlds.py'}:Asks"))
    policy = ScriptedPolicy(lambda sample, turn, ids: [*(call("Counter", by=1) if turn % 2 else "so").encode(), END])
    assert talk(policy, asks).only.info["ended_by"] == "max_turns"


def test_a_column_that_holds_a_number_is_an_error_that_says_so(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "Counter", tools_column="uses")
    for wrong in (3, [1]):
        with pytest.raises(ConfigError, match=r"column 'uses' of prompt 'test/0' is .*; needs the name of a tool"):
            talk(says("x"), settings, prompts=[make_prompt(0, uses=wrong)])


def test_a_tool_has_its_own_output_limit(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def long():\n    return 'x' * 50\n\n\nasync def far():\n    return 'y' * 50\n")
    tools = {name: ToolSettings(f"{tmp_path / 'long.py'}:{name}") for name in ("long", "far")}
    short = {f"short_{name}": replace(tool, max_result_chars=4) for name, tool in tools.items()}
    settings = AgentLoopSettings(describe_tools="never", tools=tools | short, children=1, max_result_chars=40)
    names = ("long", "far", "short_long", "short_far")
    assert results_of(("".join(call(name) for name in names),), settings) == [
        "x" * 40 + " ... (10 characters cut off)",
        "y" * 40 + " ... (10 characters cut off)",
        "xxxx ... (46 characters cut off)",
        "yyyy ... (46 characters cut off)",
    ]


def test_a_conversation_that_something_cancelled_ends_the_rollout_with_an_error_and_no_wait() -> None:
    async def cancelled() -> list[Trajectory]:
        raise asyncio.CancelledError

    async def run() -> None:
        flight = OpenConversations(SampleLimit(4))
        tasks = [RolloutTask(make_prompt(0), 0, 1, 7)]
        async with aclosing(flight.samples(tasks, lambda group: flight.begin(cancelled))) as samples:
            async for _ in samples:
                pass

    with pytest.raises(WorkerError, match="a conversation was cancelled by something that it awaited"):
        asyncio.run(asyncio.wait_for(run(), 20))
