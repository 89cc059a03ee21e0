"""Upper bounds of prompts' tokens: only schemas are tokenised, each set of them once."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.contracts.tokens import PromptBound
from rlcore.types import Message


class Counting:
    """A token for each letter of the messages, and for each letter of a schema."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        self.calls.append(len(tools))
        letters = sum(len(str(message["content"])) for message in messages)
        return tuple(range(letters + sum(len(str(tool)) for tool in tools)))


def schema(about: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "description": about}}


def test_equal_schemas_are_tokenised_once_and_others_of_the_same_name_are_not_confused_with_them() -> None:
    tokens = Counting()
    bound = PromptBound(tokens)
    messages: list[Message] = [{"role": "user", "content": "one and two"}]
    short, long = (lambda: [schema("sums")]), (lambda: [schema("sums " * 200)])
    found = [bound.of(messages, tools()) for tools in (short, short, long, short, long)]
    assert len(tokens.calls) == 2
    assert found[0] == found[1] == found[3]
    assert found[2] == found[4] == found[0] + len(str(long()[0])) - len(str(short()[0]))


def test_a_bound_is_never_below_the_tokens() -> None:
    tokens = Counting()
    for content in ("", "x", "é" * 50, "\n" * 9):
        messages: list[Message] = [{"role": "user", "content": content}] * 3
        tools = [schema("sums")] * 2
        assert PromptBound(tokens).of(messages, tools) >= len(tokens.encode_prompt(messages, tools))
