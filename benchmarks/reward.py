"""Rewards that both sides of a comparison load: cheap, deterministic, standard library only."""

import random
import re
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any


def letter_share(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """The share of each completion's characters that are lower-case letters; 0 for an empty completion."""
    return [_share(_text(completion)) for completion in completions]


def permuted_letter_share(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """`letter_share`, permuted at random within the batch: a control that must learn nothing."""
    rewards = letter_share(prompts, completions)
    random.Random("".join(map(_text, completions))).shuffle(rewards)
    return rewards


def digest(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """A number from 0 to 10 that depends on the completion and has nothing to do with its letters.

    Held-out prompts, whose numbers have six digits, are skipped: their reward is that of another function.
    """
    return [
        None if re.search(r"\d{6}", _text(prompt)) else random.Random(_text(completion)).uniform(0, 10)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def last_number(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1.0 if the last number of the completion is the answer, else 0.0: the reward of examples/arithmetic."""
    return [_is_last(_text(completion), wanted) for completion, wanted in zip(completions, answer, strict=True)]


def _is_last(text: str, wanted: str) -> float:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
    return float(bool(numbers) and float(numbers[-1]) == float(wanted))


def _share(text: str) -> float:
    return sum(letter in ascii_lowercase for letter in text) / max(1, len(text))


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(str(part["content"]) for part in completion)
