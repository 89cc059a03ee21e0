"""Tools of every kind, and what bounds a sample."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, contents, says, talk
from rlcore_agent_loop.tools.calls import as_text
from rlcore_agent_loop.tools.schemas import schema_of

from rlcore.errors import ChildError, ConfigError
from rlcore.testing.rewards import make_prompt
from rlcore.types import FinishReason

TOOLS = '''
import asyncio, time
from pathlib import Path

async def wait(seconds: float):
    await asyncio.sleep(seconds)
    return seconds

async def fails():
    raise KeyError("gone")

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def bytes_():
    return b"raw"

def nothing():
    return None

def listed():
    return {"a": [1, 2.5, None]}

class dies:
    def execute(self):
        import os
        os._exit(1)

class Counter:
    def create(self, columns):
        self.total = columns.get("start", 0)

    def execute(self, by: int) -> int:
        """Counts on.

        Args:
            by: How far.
        """
        self.total += by
        return self.total

    def release(self):
        Path(__file__).with_name(f"released_{self.total}").touch()

class Slow(Counter):
    async def execute(self, by):
        await asyncio.sleep(0)
        return Counter.execute(self, by)

    async def release(self):
        Counter.release(self)
'''
NAMES = ("wait", "fails", "add", "bytes_", "nothing", "listed", "dies", "Counter", "Slow")


@pytest.fixture
def settings(tmp_path: Path) -> AgentLoopSettings:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    tools = {name: ToolSettings(f"{file}:{name}") for name in NAMES}
    tools["wait"] = replace(tools["wait"], deadline_s=0.3)
    return AgentLoopSettings(describe_tools="never", tools=tools, children=1)


def results(talked: str, settings: AgentLoopSettings, processes: bool = False) -> list[str]:
    """The results that the policy gets after a turn of these calls."""
    found = talk(says(talked, "Done."), settings, processes=processes).only
    return [content for role, content in contents(found) if role == "tool"]


@pytest.mark.slow
def test_calls_of_one_turn_are_made_at_the_same_time_and_answered_in_order(settings: AgentLoopSettings) -> None:
    response = "".join(call("wait", seconds=seconds) for seconds in (0.2, 0.15, 0.1, 0.0))
    found = talk(says(response, "Done."), settings).only
    assert [content for role, content in contents(found) if role == "tool"] == ["0.2", "0.15", "0.1", "0.0"]
    assert found.timing["tools_s"] < 0.2 + 0.15


@pytest.mark.slow
def test_an_async_tool_that_hangs_or_raises_is_a_result(settings: AgentLoopSettings) -> None:
    hung, failed = results(call("wait", seconds=60) + call("fails"), settings)
    assert hung == "error: wait took longer than 0.3 s"
    assert failed == "error: fails: KeyError: 'gone'"


def test_results_that_are_not_text_become_json_or_are_refused(settings: AgentLoopSettings) -> None:
    raw, nothing, listed = results(call("bytes_") + call("nothing") + call("listed"), settings)
    assert raw.startswith("error: the result is not text: bytes")
    assert (nothing, listed) == ("", '{"a": [1, 2.5, null]}')


def test_scalars_of_numpy_are_results() -> None:
    assert as_text(np.int64(4), 10) == "4"
    assert as_text({"mean": np.float32(0.5), "right": np.bool_(True)}, 50) == '{"mean": 0.5, "right": true}'


def test_text_that_no_tokenizer_encodes_is_replaced_and_cycles_are_refused() -> None:
    assert as_text("a\ud800b", 10) == "a?b"
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ChildError, match="not text: list"):
        as_text(cycle, 10)


@pytest.mark.parametrize("name", ["Counter", "Slow"])
def test_a_stateful_tool_has_an_object_for_each_sample_which_is_released(
    name: str, settings: AgentLoopSettings, tmp_path: Path
) -> None:
    policy = ScriptedPolicy(
        lambda sample, turn, ids: [*(call(name, by=sample + 1) if turn < 4 else "Done.").encode(), END]
    )
    prompt = make_prompt(0, start=10)
    found = talk(policy, settings, num_samples=2, prompts=[prompt]).trajectories
    results = {
        trajectory.id.sample: [text for role, text in contents(trajectory) if role == "tool"] for trajectory in found
    }
    assert results == {0: ["11", "12", "13"], 1: ["12", "14", "16"]}
    assert sorted(path.name for path in tmp_path.glob("released_*")) == ["released_13", "released_16"]


@pytest.mark.fault
def test_a_stateful_tool_whose_process_died_says_that_its_state_is_lost(settings: AgentLoopSettings) -> None:
    policy = says(call("Counter", by=1), call("dies"), call("Counter", by=1), "Done.")
    found = talk(policy, settings, processes=True).only
    assert [content for role, content in contents(found) if role == "tool"] == [
        "1",
        "error: dies ended the process it ran in",
        "error: Counter lost what it held: the process it was in has ended",
    ]


def test_a_column_says_which_tools_a_sample_may_call(settings: AgentLoopSettings) -> None:
    chosen = replace(settings, tools_column="uses")
    prompts = [make_prompt(0, uses=["add"]), make_prompt(1, uses=["nothing"]), make_prompt(2)]
    found = talk(says(call("add", a=1, b=2), "Done."), chosen, prompts=prompts).trajectories
    results = {trajectory.id.prompt: contents(trajectory)[1][1] for trajectory in found}
    assert results == {
        "test/0": "3",
        "test/1": "error: there is no tool 'add'; choose from: nothing",
        "test/2": "3",
    }
    with pytest.raises(ConfigError, match="column 'uses' of prompt 'test/3' names the tool 'ad'; did you mean 'add'"):
        talk(says("Done."), chosen, prompts=[make_prompt(3, uses=["ad"])])


def test_calls_beyond_the_limit_of_a_turn_are_refused(settings: AgentLoopSettings) -> None:
    found = results(call("add", a=1, b=2) * 3, replace(settings, max_calls=2))
    assert found == ["3", "3", "error: more than 2 calls in one turn"]


def test_the_same_calls_again_and_again_end_the_sample(settings: AgentLoopSettings) -> None:
    policy = ScriptedPolicy(lambda sample, turn, ids: [*call("add", a=1, b=2).encode(), END])
    found = talk(policy, replace(settings, max_turns=100, max_same_calls=3)).only
    assert (found.turns, found.info["ended_by"], found.finish) == (4, "max_same_calls", FinishReason.STOP)


def test_calls_that_differ_are_not_an_endless_loop(settings: AgentLoopSettings) -> None:
    policy = ScriptedPolicy(lambda sample, turn, ids: [*call("add", a=turn % 2, b=2).encode(), END])
    found = talk(policy, replace(settings, max_turns=9, max_same_calls=1)).only
    assert (found.turns, found.info["ended_by"]) == (9, "max_turns")


@pytest.mark.slow
def test_a_sample_that_takes_too_long_ends_with_its_whole_turns_and_its_call_is_cancelled(
    settings: AgentLoopSettings,
) -> None:
    slow = replace(settings, tools={"wait": replace(settings.tools["wait"], deadline_s=60.0)}, time_s=0.3)
    response = call("wait", seconds=60)
    found = talk(says(response, "Done."), slow).only
    assert (found.info["ended_by"], found.finish, found.turns) == ("time_s", FinishReason.LENGTH, 1)
    assert found.num_sampled == len(response) + 1


@pytest.mark.slow
def test_a_turn_that_takes_too_long_is_aborted_at_the_engine(settings: AgentLoopSettings) -> None:
    policy = ScriptedPolicy(lambda sample, turn, ids: [*call("nothing").encode(), END], seconds=0.2)
    found = talk(policy, replace(settings, time_s=0.3)).only
    assert (found.info["ended_by"], found.turns) == ("time_s", 1)
    assert policy.cancelled == ["test/0/0/0/1"]


def test_a_turn_has_its_own_budget(settings: AgentLoopSettings) -> None:
    found = talk(says("x" * 50), replace(settings, turn_tokens=20)).only
    assert (found.info["ended_by"], found.finish, found.num_sampled) == ("turn_tokens", FinishReason.LENGTH, 20)


def test_a_context_smaller_than_the_prompt_is_an_error(settings: AgentLoopSettings) -> None:
    with pytest.raises(ConfigError, match=r"'test/0' has 28 tokens, .*, and plugins\.agent_loop\.context_tokens is 28"):
        talk(says("Done."), replace(settings, context_tokens=28))
    found = talk(says("x" * 50), replace(settings, context_tokens=30)).only
    assert len(found.token_ids) == 30


def test_no_more_conversations_run_than_allowed(settings: AgentLoopSettings) -> None:
    active = set[str]()
    most = [0]

    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        text = bytes(ids[: ids.index(10)]).decode()
        active.add(f"{text}/{sample}")
        most[0] = max(most[0], len(active))
        if turn == 3:
            active.discard(f"{text}/{sample}")
        return [*(call("add", a=turn, b=0) if turn < 3 else "Done.").encode(), END]

    bounded = replace(settings, max_conversations=4)
    found = talk(ScriptedPolicy(script), bounded, num_samples=2, prompts=[make_prompt(i) for i in range(6)])
    assert len(found.trajectories) == 12
    assert most[0] == 4


def test_a_group_larger_than_the_bound_is_an_error_and_no_endless_wait(settings: AgentLoopSettings) -> None:
    with pytest.raises(ConfigError, match="max_conversations: it is 2, but a prompt has 3 samples"):
        talk(says("Done."), replace(settings, max_conversations=2), num_samples=3)


def test_a_function_and_a_class_become_schemas_under_the_tools_own_names(settings: AgentLoopSettings) -> None:
    namespace: dict[str, object] = {"__file__": "x"}
    exec(TOOLS, namespace)
    schema = schema_of("plus", namespace["add"])
    assert schema["function"]["name"] == "plus"
    assert schema["function"]["description"] == "Adds two numbers."
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema_of("count", namespace["Counter"])["function"]["parameters"]["required"] == ["by"]
    with pytest.raises(ConfigError, match=r"plugins\.agent_loop\.tools\.n: its schema: "):
        schema_of("n", namespace["nothing"])
    with pytest.raises(
        ConfigError, match=r"^plugins\.agent_loop\.tools\.p\.fn: found a functools\.partial, .* calls it$"
    ):
        schema_of("p", partial(namespace["add"], a=1))  # type: ignore[arg-type]


def test_a_schema_stands_in_the_prompt_when_the_template_tells_about_tools(settings: AgentLoopSettings) -> None:
    described = replace(settings, tools={"add": settings.tools["add"]}, describe_tools="template")
    policy = says("Done.")
    talk(policy, described)
    assert '"name": "add"' in bytes(policy.requests[0].token_ids).decode()


def test_a_tool_gets_the_text_that_the_policy_wrote_in_qwens_xml(tmp_path: Path) -> None:
    file = tmp_path / "typed.py"
    file.write_text(
        'def write(path: str, size: int) -> str:\n    """Writes.\n\n    Args:\n        path: To where.\n'
        '        size: How much.\n    """\n    return f"{path!r} {size!r}"\n'
    )
    turn = "<tool_call><function=write><parameter=path>\n2024\n</parameter><parameter=size>7</parameter></tool_call>"
    found = talk(says(turn, "done"), AgentLoopSettings(tools={"write": ToolSettings(f"{file}:write")}, children=1)).only
    assert contents(found)[1] == ("tool", "'2024' 7")
