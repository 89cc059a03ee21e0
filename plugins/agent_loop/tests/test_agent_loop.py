"""The loop with a scripted policy over bytes, and real child processes for the tools."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlcore_agent_loop import requests
from rlcore_agent_loop.calls import MAX_CALLS, find_calls
from rlcore_agent_loop.loop import ToolLoop
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.tools import Tools
from rlcore_agent_loop.turns import Turns

from rlcore import metrics
from rlcore.agents import RolloutTask
from rlcore.child import load_reference
from rlcore.cluster.child import ChildProcesses
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.testing import write_prompts
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import make_prompt
from rlcore.tokens import ByteTokens
from rlcore.train import train
from rlcore.types import Completion, Finish, GenerateRequest, Lane, Message, Sampling, Trajectory
from rlcore.workers import Child

EOS = ByteTokens.EOS
TOOLS = """
import os, time

def add(a, b):
    return a + b

def raises():
    raise KeyError("no such thing")

def hangs():
    while True:
        pass

def dies():
    os._exit(3)

def long():
    return "x" * 1_000_000

def slow(a):
    time.sleep(a)
    return a
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class ScriptedPolicy:
    """Says what the script makes of (sample, turn, tokens so far); every token has log-prob -its position."""

    def __init__(self, script: Callable[[int, int, tuple[int, ...]], Sequence[int]], version_of_turn: int = 0) -> None:
        self._script, self._version_of_turn = script, version_of_turn
        self.requests: list[GenerateRequest] = []

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        self.requests += requests
        for request in requests:
            fields = request.id.split("/")  # source/index/epoch, and of later turns /sample/turns before
            for draw in range(request.n):
                await asyncio.sleep(0)
                sample, turn = (int(fields[3]), int(fields[4]) + 1) if len(fields) > 3 else (draw, 1)
                ids = list(self._script(sample, turn, request.token_ids))
                cut = len(ids) > request.sampling.max_tokens
                ids = ids[: request.sampling.max_tokens]
                start = len(request.token_ids)
                yield Completion(
                    request_id=request.id,
                    sample=draw,
                    token_ids=np.array(ids, dtype=np.int32),
                    logprobs=np.array([-float(start + index) for index in range(len(ids))], dtype=np.float32),
                    finish=Finish.LENGTH if cut else Finish.STOP,
                    version=self._version_of_turn * turn,
                    generate_s=0.5,
                )


class HereChild:
    """A child that is none: for tests in which no tool misbehaves."""

    alive = True

    def __init__(self, served: Any) -> None:
        self._served = served

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        return await asyncio.to_thread(getattr(self._served, method), *args)

    async def close(self) -> None:
        self.alive = False


class HereChildren:
    """Runs what children would serve in this process."""

    async def start(self, reference: str, *args: Any, name: str, threads: int = 1, deadline_s: float = 60.0) -> Child:
        return HereChild(load_reference(reference)(*args))

    async def close(self) -> None:
        """There is nothing to end."""


def says(*turns: str) -> ScriptedPolicy:
    """A policy that says these turns, in every sample."""
    return ScriptedPolicy(lambda sample, turn, ids: [*turns[turn - 1].encode(), EOS])


@pytest.fixture
def settings(tmp_path: Path) -> AgentLoopSettings:
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    names = ("add", "raises", "hangs", "dies", "long", "slow")
    tools = {name: ToolSettings(f"{file}:{name}", deadline_s=10.0) for name in names}
    return AgentLoopSettings(tools=tools | {"hangs": replace(tools["hangs"], deadline_s=0.5)})


def run(
    policy: ScriptedPolicy,
    settings: AgentLoopSettings,
    num_samples: int = 1,
    max_tokens: int = 10_000,
    processes: bool = False,
) -> tuple[list[Trajectory], dict[str, float]]:
    """(trajectories in the order they came, metrics); with `processes` tools run in real child processes."""

    async def roll() -> tuple[list[Trajectory], dict[str, float]]:
        children = ChildProcesses() if processes else HereChildren()
        loop = ToolLoop(policy, ByteTokens(), Tools(children, settings), settings)
        try:
            await loop.start()
            task = RolloutTask(make_prompt(0), epoch=0, n=num_samples, seed=7)
            found = [each async for each in loop.rollout([task], Sampling(max_tokens=max_tokens), Lane.TRAIN)]
            return found, loop.metrics()
        finally:
            await loop.close()
            await loop.close()
            await children.close()

    with leaks():
        return asyncio.run(roll())


def contents(trajectory: Trajectory) -> list[tuple[str, str]]:
    return [(str(message["role"]), str(message["content"])) for message in trajectory.completion if message]  # type: ignore[index]


def test_a_result_stands_between_two_turns_and_only_sampled_tokens_are_trained(settings: AgentLoopSettings) -> None:
    policy = says(f"Let me add. {call('add', a=2, b=3)}", "It is 5.")
    [found], metrics = run(policy, settings)
    first = [*f"Let me add. {call('add', a=2, b=3)}".encode(), EOS]
    between, last = list(b"\ntool: 5\nassistant: "), [*b"It is 5.", EOS]
    prompt = list(policy.requests[0].token_ids)
    assert found.token_ids.tolist() == prompt + first + between + last
    expected_mask = [False] * len(prompt) + [True] * len(first) + [False] * len(between) + [True] * len(last)
    assert found.loss_mask.tolist() == expected_mask
    assert found.logprobs.tolist() == [-float(index) if mask else 0.0 for index, mask in enumerate(expected_mask)]
    assert contents(found) == [
        ("assistant", f"Let me add. {call('add', a=2, b=3)}"),
        ("tool", "5"),
        ("assistant", "It is 5."),
    ]
    assert (found.turns, found.finish, found.timing["generate_s"]) == (2, Finish.STOP, 1.0)
    assert metrics == {"agent/turns_mean": 2.0, "agent/num_tool_calls": 1.0, "agent/num_tool_errors": 0.0}


def test_a_response_without_a_call_is_one_turn(settings: AgentLoopSettings) -> None:
    found, metrics = run(says("It is 5."), settings, num_samples=3)
    assert [(each.id.sample, each.turns, each.num_parts) for each in found] == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert metrics["agent/num_tool_calls"] == 0.0


def test_turns_end_at_max_turns_and_the_last_calls_are_not_made(settings: AgentLoopSettings) -> None:
    policy = ScriptedPolicy(lambda sample, turn, ids: [*call("add", a=turn, b=0).encode(), EOS])
    [found], metrics = run(policy, replace(settings, max_turns=3))
    assert found.turns == 3
    assert [content for role, content in contents(found) if role == "tool"] == ["1", "2"]
    assert metrics["agent/num_tool_calls"] == 2.0


FAILURES = {
    "raises": (call("raises"), "KeyError"),
    "hangs": (call("hangs"), "hangs took longer than 0.5 s"),
    "dies": (call("dies"), "dies ended the process it ran in"),
    "wrong arguments": (call("add", a=1), "TypeError"),
    "unknown": (call("subtract"), "there is no tool 'subtract'; choose from: add"),
    "no JSON": ("<tool_call>add(2, 3)</tool_call>", "the call is not JSON"),
    "code": ('<tool_call>__import__("os").abort()</tool_call>', "the call is not JSON"),
    "no name": ('<tool_call>{"tool": "add"}</tool_call>', "the call has no name"),
    "list arguments": ('<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>', "the arguments are no object"),
    "deep": (f"<tool_call>{'[' * 5000}</tool_call>", "the call is not JSON"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_call_that_fails_is_a_result_and_the_next_call_works(name: str, settings: AgentLoopSettings) -> None:
    said, expected = FAILURES[name]
    [found], metrics = run(says(said, call("add", a=2, b=3), "Done."), replace(settings, children=1), processes=True)
    error, good = [content for role, content in contents(found) if role == "tool"]
    assert error.startswith("error: ")
    assert expected in error
    assert good == "5"
    assert metrics["agent/num_tool_errors"] == 1.0


def test_a_long_result_is_cut_off_and_says_so(settings: AgentLoopSettings) -> None:
    [found], _ = run(says(call("long"), "Done."), replace(settings, max_result_chars=10))
    assert contents(found)[1] == ("tool", "xxxxxxxxxx ... (999990 characters cut off)")


def test_a_result_that_would_not_fit_into_max_tokens_ends_the_sample_with_what_was_sampled(
    settings: AgentLoopSettings,
) -> None:
    said = call("add", a=2, b=3)
    [found], _ = run(says(said, "Done."), settings, max_tokens=len(said) + 1 + 10)
    assert (found.finish, found.turns, found.num_sampled) == (Finish.LENGTH, 1, len(said) + 1)
    assert found.token_ids.tolist()[-1] == EOS


def test_max_tokens_bounds_all_turns_together(settings: AgentLoopSettings) -> None:
    policy = says(call("add", a=2, b=3), "y" * 1000)
    [found], _ = run(policy, settings, max_tokens=100)
    assert found.finish is Finish.LENGTH
    assert len(found.token_ids) - found.prompt_length == 100
    assert policy.requests[1].sampling.max_tokens == 100 - len(call("add", a=2, b=3)) - 1 - len(
        "\ntool: 5\nassistant: "
    )


def test_a_call_in_a_truncated_turn_is_not_made(settings: AgentLoopSettings) -> None:
    said = call("add", a=2, b=3)
    _, metrics = run(says(f"{said} and then"), settings, max_tokens=len(said) + 3)
    assert metrics["agent/num_tool_calls"] == 0.0


def test_a_finished_sample_does_not_wait_for_the_tools_of_others(settings: AgentLoopSettings) -> None:
    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        return [*(call("slow", a=0.2) if sample == 0 and turn == 1 else "Done.").encode(), EOS]

    found, _ = run(ScriptedPolicy(script), settings, num_samples=3)
    assert [each.id.sample for each in found] == [1, 2, 0]


def test_the_set_of_requests_does_not_depend_on_how_long_tools_take(settings: AgentLoopSettings) -> None:
    def script(pauses: Sequence[float]) -> ScriptedPolicy:
        return ScriptedPolicy(
            lambda sample, turn, ids: [*(call("slow", a=pauses[sample]) if turn == 1 else "ok").encode(), EOS]
        )

    one, other = script((0.0, 0.1, 0.2)), script((0.2, 0.1, 0.0))
    for policy in (one, other):
        run(policy, settings, num_samples=3)
    assert [each.id for each in one.requests] == [each.id for each in other.requests]
    assert [each.seed for each in one.requests] == [each.seed for each in other.requests]
    assert len({each.seed for each in one.requests}) == 4


def test_each_run_of_tokens_names_the_version_that_sampled_it(settings: AgentLoopSettings) -> None:
    first = [*call("add", a=1, b=1).encode(), EOS]
    policy = ScriptedPolicy(lambda sample, turn, ids: first if turn == 1 else [EOS], version_of_turn=3)
    [found], _ = run(policy, settings)
    start = found.prompt_length
    assert found.versions == ((start, 3), (start + len(first) + len("\ntool: 2\nassistant: "), 6))


def test_a_thousand_random_turns_come_back_token_for_token(settings: AgentLoopSettings) -> None:
    numbers = random.Random(0)
    said: dict[tuple[int, int], list[int]] = {}

    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        # Bytes that are no UTF-8 among them: text of these ids is not what was sampled.
        noise = [numbers.randrange(256) for _ in range(numbers.randrange(40))]
        tail = [] if turn == 4 else list(call("add", a=sample, b=turn).encode())
        said[sample, turn] = [*noise, *tail, *([EOS] if numbers.random() < 0.5 else [])]
        return said[sample, turn]

    found, _ = run(ScriptedPolicy(script), settings, num_samples=250)
    assert len(said) == 1000
    for each in found:
        sampled = [number for turn in range(1, 5) for number in said[each.id.sample, turn]]
        assert each.token_ids[each.loss_mask].tolist() == sampled


class TemplateWithEnds(ByteTokens):
    """Ends each message with the end-of-turn token, as chat templates of real models do."""

    def _encode_conversation(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        ids = [number for each in messages for number in (*f"<{each['role']}>{each['content']}".encode(), EOS)]
        return (*ids, *b"<assistant>")


class TemplateThatForgets(ByteTokens):
    """Writes the first message differently once others follow."""

    def _encode_conversation(self, messages: list[dict[str, Any]]) -> tuple[int, ...]:
        return super()._encode_conversation(messages[-1:])


def test_the_end_of_a_turn_is_added_only_where_the_policy_did_not_sample_it() -> None:
    turns = Turns(TemplateWithEnds("a system prompt"), "tool")
    rest = (*b"<tool>5", EOS, *b"<tool>6", EOS, *b"<assistant>")
    assert turns.after(EOS, ["5", "6"]) == rest
    assert turns.after(ord("x"), ["5", "6"]) == (EOS, *rest)


def test_turns_continue_a_conversation_as_the_template_would_write_it_whole() -> None:
    tokens = TemplateWithEnds()
    asked: list[Message] = [{"role": "user", "content": "2 + 3"}]
    said = (*b"let me see", EOS)
    whole = tokens.encode_prompt(
        [*asked, {"role": "assistant", "content": "let me see"}, {"role": "tool", "content": "5"}]
    )
    assert (*tokens.encode_prompt(asked), *said, *Turns(tokens, "tool").after(EOS, ["5"])) == whole


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="writes earlier turns differently"):
        Turns(TemplateThatForgets(), "tool").after(EOS, ["5"])


def test_calls_beyond_the_limit_of_a_turn_are_refused() -> None:
    found = find_calls(call("add", a=1, b=2) * (MAX_CALLS + 2))
    assert [each.problem for each in found] == [""] * MAX_CALLS + [f"more than {MAX_CALLS} calls"] * 2


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ({}, "there is none"),
        ({"add": ToolSettings("add")}, "found 'add'; needs file.py:name or module:name"),
        ({"add": ToolSettings("nowhere.py:add")}, "there is no file 'nowhere.py'"),
    ],
)
def test_tools_that_cannot_work_are_said_when_the_plan_is_made(tools: dict[str, ToolSettings], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        requests(RunConfig(), AgentLoopSettings(tools=tools))


def test_a_run_with_the_plugin_trains_and_measures_the_agent(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def add(a, b):\n    return a + b\n\n"
        "def score(trajectory):\n    return float(trajectory.completion[0]['role'] == 'assistant')\n"
    )
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"roles": {"fn": f"{tmp_path / 'mine.py'}:score"}}},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
        "plugins": {"agent_loop": {"tools": {"add": {"fn": f"{tmp_path / 'mine.py'}:add"}}, "children": 1}},
    }
    result = train(config, plugins=["null"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["agent/turns_mean"] for row in steps] == [1.0, 1.0]
    assert [row["reward/roles/mean"] for row in steps] == [1.0, 1.0]
