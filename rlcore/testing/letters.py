"""A reward that the null policy can learn, with the standard library only."""

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any


def count_letter(
    prompts: Sequence[Any], completions: Sequence[str], letters: str = ascii_lowercase, **columns: Any
) -> list[float]:
    """Share of each completion's characters that are in `letters`; 0 for an empty completion."""
    return [sum(letter in letters for letter in text) / max(1, len(text)) for text in completions]
