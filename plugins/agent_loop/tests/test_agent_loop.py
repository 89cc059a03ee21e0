"""The loop with a scripted policy over bytes, and real child processes for the tools."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, contents, says, talk

from rlcore.types import FinishReason

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


@pytest.fixture
def settings(tmp_path: Path) -> AgentLoopSettings:
    file = tmp_path / "my_tools.py"
    file.write_text(TOOLS)
    names = ("add", "raises", "hangs", "dies", "long", "slow")
    tools = {name: ToolSettings(f"{file}:{name}", deadline_s=10.0) for name in names}
    return AgentLoopSettings(describe_tools="never", tools=tools | {"hangs": replace(tools["hangs"], deadline_s=0.5)})


def test_a_result_stands_between_two_turns_and_only_sampled_tokens_are_trained(settings: AgentLoopSettings) -> None:
    policy = says(f"Let me add. {call('add', a=2, b=3)}", "It is 5.")
    talked = talk(policy, settings)
    found = talked.only
    first = [*f"Let me add. {call('add', a=2, b=3)}".encode(), END]
    between, last = list(b"\ntool: 5\nassistant: "), [*b"It is 5.", END]
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
    assert (found.turns, found.finish, found.timing["generate_s"]) == (2, FinishReason.STOP, 1.0)
    assert talked.metrics == {
        "agent/turns_mean": 2.0,
        "agent/parts_mean": 1.0,
        "agent/num_new_parts": 0.0,
        "agent/num_tool_calls": 1.0,
        "agent/num_tool_errors": 0.0,
        "agent/ended/stop_frac": 1.0,
    }


def test_a_response_without_a_call_is_one_turn(settings: AgentLoopSettings) -> None:
    talked = talk(says("It is 5."), settings, num_samples=3)
    assert [
        (trajectory.id.sample, trajectory.turns, trajectory.num_segments) for trajectory in talked.trajectories
    ] == [
        (0, 1, 1),
        (1, 1, 1),
        (2, 1, 1),
    ]
    assert talked.metrics["agent/num_tool_calls"] == 0.0


def test_turns_end_at_max_turns_and_the_last_calls_are_not_made(settings: AgentLoopSettings) -> None:
    policy = ScriptedPolicy(lambda sample, turn, ids: [*call("add", a=turn, b=0).encode(), END])
    talked = talk(policy, replace(settings, max_turns=3))
    found = talked.only
    assert found.turns == 3
    assert [content for role, content in contents(found) if role == "tool"] == ["1", "2"]
    assert talked.metrics["agent/num_tool_calls"] == 2.0


KILLED = ("hangs", "dies")
FAILURES = {
    "raises": (call("raises"), "KeyError"),
    "hangs": (call("hangs"), "hangs took longer than 0.5 s"),
    "dies": (call("dies"), "dies ended the process it ran in"),
    "wrong arguments": (call("add", a=1), "TypeError"),
    "unknown": (call("subtract"), "there is no tool 'subtract'; choose from: add"),
    "no JSON": ("<tool_call>add(2, 3)</tool_call>", "the call is not JSON"),
    "code": ('<tool_call>__import__("os").abort()</tool_call>', "the call is not JSON"),
    "no name": ('<tool_call>{"tool": "add"}</tool_call>', "the call has no name"),
    "list arguments": ('<tool_call>{"name": "add", "arguments": [2]}</tool_call>', "the arguments are not an object"),
    "deep": (f"<tool_call>{'[' * 5000}</tool_call>", "the call is not JSON"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.fault) if name in KILLED else name for name in FAILURES]
)
def test_a_call_that_fails_is_a_result_and_the_next_call_works(name: str, settings: AgentLoopSettings) -> None:
    response, expected = FAILURES[name]
    talked = talk(
        says(response, call("add", a=2, b=3), "Done."), replace(settings, children=1), processes=name in KILLED
    )
    error, good = [content for role, content in contents(talked.only) if role == "tool"]
    assert error.startswith("error: ")
    assert expected in error
    assert good == "5"
    assert talked.metrics["agent/num_tool_errors"] == 1.0


def test_a_long_result_is_cut_off_and_says_so(settings: AgentLoopSettings) -> None:
    found = talk(says(call("long"), "Done."), replace(settings, max_result_chars=10)).only
    assert contents(found)[1] == ("tool", "xxxxxxxxxx ... (999990 characters cut off)")


def test_a_result_that_would_not_fit_into_max_tokens_ends_the_sample_with_what_was_sampled(
    settings: AgentLoopSettings,
) -> None:
    response = call("add", a=2, b=3)
    found = talk(says(response, "Done."), settings, max_tokens=len(response) + 1 + 10).only
    assert (found.finish, found.turns, found.num_sampled) == (FinishReason.LENGTH, 1, len(response) + 1)
    assert found.token_ids.tolist()[-1] == END


def test_max_tokens_bounds_all_turns_together(settings: AgentLoopSettings) -> None:
    policy = says(call("add", a=2, b=3), "y" * 1000)
    found = talk(policy, settings, max_tokens=100).only
    assert found.finish is FinishReason.LENGTH
    assert len(found.token_ids) - found.prompt_length == 100
    assert policy.requests[1].sampling.max_tokens == 100 - len(call("add", a=2, b=3)) - 1 - len(
        "\ntool: 5\nassistant: "
    )


def test_a_call_in_a_truncated_turn_is_not_made(settings: AgentLoopSettings) -> None:
    response = call("add", a=2, b=3)
    talked = talk(says(f"{response} and then"), settings, max_tokens=len(response) + 3)
    assert talked.metrics["agent/num_tool_calls"] == 0.0


@pytest.mark.slow
def test_a_finished_sample_does_not_wait_for_the_tools_of_others(settings: AgentLoopSettings) -> None:
    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        return [*(call("slow", a=0.2) if sample == 0 and turn == 1 else "Done.").encode(), END]

    found = talk(ScriptedPolicy(script), settings, num_samples=3).trajectories
    assert [trajectory.id.sample for trajectory in found] == [1, 2, 0]


@pytest.mark.slow
def test_the_set_of_requests_does_not_depend_on_how_long_tools_take(settings: AgentLoopSettings) -> None:
    def script(pauses: Sequence[float]) -> ScriptedPolicy:
        return ScriptedPolicy(
            lambda sample, turn, ids: [*(call("slow", a=pauses[sample]) if turn == 1 else "ok").encode(), END]
        )

    one, other = script((0.0, 0.1, 0.2)), script((0.2, 0.1, 0.0))
    for policy in (one, other):
        talk(policy, settings, num_samples=3)
    assert {(request.id, request.seed) for request in one.requests} == {
        (request.id, request.seed) for request in other.requests
    }
    assert len({request.seed for request in one.requests}) == 4


def test_each_run_of_tokens_names_the_version_that_sampled_it(settings: AgentLoopSettings) -> None:
    first = [*call("add", a=1, b=1).encode(), END]
    policy = ScriptedPolicy(lambda sample, turn, ids: first if turn == 1 else [END], version_of_turn=3)
    found = talk(policy, settings).only
    start = found.prompt_length
    assert found.versions == ((start, 3), (start + len(first) + len("\ntool: 2\nassistant: "), 6))


def test_a_trajectory_says_of_each_turn_where_it_began_who_sampled_it_how_it_ended_and_how_long_it_took(
    settings: AgentLoopSettings,
) -> None:
    first, response = [*call("slow", a=0.05).encode(), END], "x" * 30
    script = {1: first, 2: [*response.encode(), END]}
    policy = ScriptedPolicy(lambda sample, turn, ids: script[turn], version_of_turn=3)
    found = talk(policy, replace(settings, turn_tokens=len(first))).only
    later = found.prompt_length + len(first) + len("\ntool: 0.05\nassistant: ")
    assert found.info["turns"] == (
        {"start": found.prompt_length, "num_tokens": len(first), "versions": (3,), "finish": "stop"},
        {"start": later, "num_tokens": len(response) + 1, "versions": (6,), "finish": "stop"},
    )
    assert found.info["timing"]["generate_s"] == (0.5, 0.5)
    waited, nothing = found.info["timing"]["tools_s"]
    assert 0.05 <= waited <= found.timing["tools_s"]
    assert 0.0 <= nothing < waited
    cut = talk(ScriptedPolicy(lambda *_: list(b"x" * 90)), replace(settings, turn_tokens=20)).only
    assert [(turn["num_tokens"], turn["finish"]) for turn in cut.info["turns"]] == [(20, "length")]
