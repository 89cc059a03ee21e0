"""Selects the prompts that may be used."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlcore.data.conversation import question_of
from rlcore.errors import ConfigError, boundary
from rlcore.types import Message, Prompt


class EncodesPrompts(Protocol):
    """The one method of `rlcore.contracts.tokens.Tokens` that selection needs."""

    def encode_prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]: ...


def filter_long(
    prompts: Sequence[Prompt],
    tokens: EncodesPrompts,
    max_tokens: int,
    check: Callable[[Prompt, int], None] = lambda prompt, num_tokens: None,
    schemas: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> tuple[list[Prompt], int]:
    """(the prompts of at most `max_tokens` tokens, chat template included; the number of prompts left out).

    `check` is called with each prompt that stays and its number of tokens, and may raise. `schemas` of the tools that
    the template shows with each prompt; empty: none.
    """
    kept = []
    for prompt, tools in zip(prompts, schemas or [()] * len(prompts), strict=True):
        try:
            with boundary("it cannot be tokenised", ConfigError):  # a value of hundreds of levels
                num_tokens = len(tokens.encode_prompt(prompt.messages, tools))
        except ConfigError as error:  # or the chat template refuses it
            raise ConfigError(f"prompt '{prompt.id}': {error}") from error
        if num_tokens <= max_tokens:
            check(prompt, num_tokens)
            kept.append(prompt)
    return kept, len(prompts) - len(kept)


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
