"""Prompts that are too long are left out, schemas of their tools included."""

from collections.abc import Sequence
from typing import Any

import pytest

from rlcore.data import filter_long
from rlcore.errors import ConfigError
from rlcore.testing.rewards import make_prompt
from rlcore.types import FrozenDict, Message, Prompt


def user(text: str) -> tuple[Message, ...]:
    return (FrozenDict({"role": "user", "content": text}),)


def test_over_long_prompts_are_left_out() -> None:
    class WordTokens:
        def encode_prompt(self, messages: Sequence[Message], tools: Any = ()) -> tuple[int, ...]:
            return tuple(range(sum(len(str(message["content"]).split()) for message in messages)))

    prompts = [Prompt(f"a/{n}", user("word " * n), None, "a") for n in (1, 5, 4, 9)]
    assert [prompt.id for prompt in filter_long(prompts, WordTokens(), 4)] == ["a/1", "a/4"]
    seen: list[tuple[str, int]] = []
    filter_long(prompts, WordTokens(), 4, lambda prompt, num_tokens: seen.append((prompt.id, num_tokens)))
    assert seen == [("a/1", 1), ("a/4", 4)]


@pytest.mark.parametrize("is_checked", [False, True])
def test_schemas_count_and_only_prompts_near_the_limit_are_tokenised_with_them(is_checked: bool) -> None:
    counted: list[tuple[int, int]] = []

    class LetterTokens:
        """A token per letter, and 100 per schema."""

        def encode_prompt(self, messages: Sequence[Message], tools: Any = ()) -> tuple[int, ...]:
            num_letters = sum(len(str(message["content"])) for message in messages)
            counted.append((num_letters, len(tools)))
            return tuple(range(num_letters + 100 * len(tools)))

    tools = {10: 0, 11: 1, 12: 2, 150: 3, 250: 1, 290: 1, 301: 1, 390: 0, 401: 1}
    schemas = [[{"type": "function"}] * num for num in tools.values()]
    prompts = [Prompt(f"a/{letters}", user("x" * letters), None, "a") for letters in tools]
    seen: list[tuple[str, int]] = []

    def check(prompt: Prompt, num_tokens: int) -> None:
        seen.append((prompt.id, num_tokens))

    kept = filter_long(prompts, LetterTokens(), 400, check if is_checked else None, schemas)
    fitting = [10, 11, 12, 250, 290, 390]
    assert [prompt.id for prompt in kept] == [f"a/{letters}" for letters in fitting]
    exactly = [letters for letters, num in counted if num and letters > 1]
    assert exactly == ([11, 12, 150, 250, 290, 301] if is_checked else [150, 250, 290, 301])
    assert seen == ([(f"a/{letters}", letters + 100 * tools[letters]) for letters in fitting] if is_checked else [])


def test_a_prompt_that_the_chat_template_refuses_is_named() -> None:
    class Refuses:
        def encode_prompt(self, messages: Sequence[Message], tools: Any = ()) -> tuple[int, ...]:
            raise ConfigError("the chat template of 'm': TemplateError: no")

    with pytest.raises(ConfigError, match=r"^prompt 'test/0': the chat template of 'm': TemplateError: no$"):
        filter_long([make_prompt(0)], Refuses(), 4)
    with pytest.raises(
        ConfigError, match=r"^prompt 'test/0' with the schemas of its tools: the chat template of 'm': "
    ):
        filter_long([make_prompt(0)], Refuses(), 4, schemas=[[{"type": "function"}]])
