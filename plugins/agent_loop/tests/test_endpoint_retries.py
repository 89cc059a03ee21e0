"""Requests that fail leave nothing behind, and what cannot be served is refused by its name."""

from typing import Any

import pytest
from rlcore_agent_loop.agents.messages import answer, for_template, normalised
from rlcore_agent_loop.testing import END, HELLO, Ask, ScriptedPolicy, says, served
from rlcore_agent_loop.tools.parsers import pythonic

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
MORE = {"role": "user", "content": "more"}


def test_a_request_that_is_corrected_says_its_messages_once() -> None:
    async def work(ask: Ask) -> None:
        _, first = await ask(HELLO)
        messages = [*HELLO["messages"], first["choices"][0]["message"], MORE]
        for wrong in ({"stop": [""]}, {"max_tokens": 0.5}, {"tool_choice": "required"}):
            assert (await ask({"messages": messages, **wrong}))[0] == 400
        assert (await ask({"messages": messages}))[0] == 200

    [found] = served(says("-", "one", "two"), work).episode.trajectories()
    assert found.token_ids.tolist() == [
        *b"user: hello\nassistant: one", END, *b"\nuser: more\nassistant: two", END,
    ]  # fmt: skip


def test_a_generation_that_fails_leaves_neither_a_message_nor_a_part() -> None:
    def script(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        if turn in (3, 5):
            raise KeyError("engine")
        return [*b"one", END]

    async def work(ask: Ask) -> None:
        _, first = await ask(HELLO)
        messages = [*HELLO["messages"], first["choices"][0]["message"], MORE]
        assert [(await ask({"messages": messages}))[0] for _ in range(2)] == [400, 200]
        other = [{"role": "user", "content": "other"}]
        assert [(await ask({"messages": messages}))[0] for messages in (other, [*other, MORE])] == [400, 200]

    recording = served(ScriptedPolicy(script), work, max_turns=9)
    first, second = recording.episode.trajectories()
    assert bytes(i for i in first.token_ids if i != END).count(b"more") == 1
    assert bytes(second.token_ids[: second.prompt_length].tolist()) == b"user: other\nuser: more\nassistant: "
    assert isinstance(recording.failure, KeyError)


@pytest.mark.parametrize("text", ["[add(a={1,2})]", "[add(a=b'x')]", "[add(a=1j)]"])
def test_arguments_that_json_does_not_know_stay_in_the_text(text: str) -> None:
    assert not pythonic(text)[0].problem
    assert answer(text, pythonic(text), 1) == {"role": "assistant", "content": text}


def test_tool_choice_none_makes_no_call_of_what_the_policy_says() -> None:
    response = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    async def work(ask: Ask) -> None:
        for choice, reason in (("none", "stop"), ("auto", "tool_calls")):
            _, found = await ask({**HELLO, "tools": TOOLS, "tool_choice": choice})
            assert found["choices"][0]["finish_reason"] == reason

    served(says(response, response, response), work)


@pytest.mark.parametrize(
    "setting",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 100}},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"functions": [{"name": "add"}]},
    ],
)
def test_a_setting_that_is_not_served_is_refused_by_its_name(setting: dict[str, Any]) -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask({**HELLO, "tools": TOOLS, **setting})
        assert (status, found["error"]["message"].partition("=")[0]) == (400, next(iter(setting)))

    assert served(says("one"), work).episode.segments == []


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": 3}, "a content that is int"),
        ({"role": "assistant", "tool_calls": 3}, "tool_calls needs a list"),
    ],
)
def test_messages_of_a_wrong_kind_are_refused(message: dict[str, Any], why: str) -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask({"messages": [message]})
        assert status == 400
        assert why in found["error"]["message"]

    served(says("one"), work)


def test_texts_that_no_tokenizer_encodes_are_replaced_and_arguments_that_are_no_object_left_out() -> None:
    assert normalised([{"role": "user", "content": "a\ud800b"}])[0]["content"] == "a?b"
    call = {"id": "1", "function": {"name": "add", "arguments": "[1]"}}
    [found] = for_template(normalised([{"role": "assistant", "tool_calls": [call]}]))
    assert found["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_that_are_nested_deep_in_their_text_are_left_out() -> None:
    async def work(ask: Ask) -> None:
        for depth in (400, 600, 900):
            arguments = '{"a":' * depth + "1" + "}" * depth
            calls = [{"id": "1", "function": {"name": "add", "arguments": arguments}}]
            messages = [
                *HELLO["messages"],
                {"role": "assistant", "tool_calls": calls},
                {"role": "tool", "content": "2"},
            ]
            assert (await ask({"messages": messages}))[0] == 200

    served(says("-", "one", "two", "three"), work)
