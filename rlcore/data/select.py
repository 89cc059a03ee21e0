"""Selects the prompts that may be used."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore.contracts.tokens import EncodesPrompts, PromptBound
from rlcore.data.conversation import question_of
from rlcore.errors import ConfigError, boundary
from rlcore.types import Prompt


class _Lengths:
    """Tokens of prompts: counted where the limit or a check needs the number, else an upper bound."""

    def __init__(self, tokens: EncodesPrompts, limit: int, exact: bool) -> None:
        self._tokens, self._limit, self._exact = tokens, limit, exact
        self._bound = PromptBound(tokens)

    def of(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]]) -> int:
        num_tokens = len(self._tokens.encode_prompt(prompt.messages))
        if not tools or num_tokens > self._limit:
            return num_tokens
        most = self._bound.of(prompt.messages, tools)
        if most <= self._limit and not self._exact:
            return most
        return len(self._tokens.encode_prompt(prompt.messages, tools))


def filter_long(
    prompts: Sequence[Prompt],
    tokens: EncodesPrompts,
    max_tokens: int,
    check: Callable[[Prompt, int], None] | None = None,
    schemas: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> list[Prompt]:
    """The prompts of at most `max_tokens` tokens, chat template included.

    `check` is called with each prompt that stays and its number of tokens, and may raise. `schemas` of the tools that
    the template shows with each prompt; empty: none.
    """
    kept, lengths = [], _Lengths(tokens, max_tokens, exact=check is not None)
    for prompt, tools in zip(prompts, schemas or [()] * len(prompts), strict=True):
        try:
            with boundary("it cannot be tokenised", ConfigError):  # a value of hundreds of levels
                num_tokens = lengths.of(prompt, tools)
        except ConfigError as error:  # or the chat template refuses it
            which = f"prompt '{prompt.id}'" + (" with the schemas of its tools" if tools else "")
            raise ConfigError(f"{which}: {error}") from error
        if num_tokens <= max_tokens:
            if check is not None:
                check(prompt, num_tokens)
            kept.append(prompt)
    return kept


def refuse_overlap(train: Mapping[str, Sequence[Prompt]], heldout: Mapping[str, Sequence[Prompt]]) -> None:
    """ConfigError if a held-out question occurs in training, because an evaluation would measure memory.

    Questions are equal if their conversations are, without system messages, case and layout of white space.
    """
    trained = {question_of(prompt.messages): source for source, prompts in train.items() for prompt in prompts}
    for source, prompts in heldout.items():
        shared = [prompt for prompt in prompts if question_of(prompt.messages) in trained]
        if shared:
            question = question_of(shared[0].messages)
            raise ConfigError(
                f"eval.sources.{source}: {len(shared)} of {len(prompts)} held-out questions occur in training, such as "
                f"{question[:100]!r} in data.sources.{trained[question]}; choose another split, file or "
                "seed for one of them"
            )
