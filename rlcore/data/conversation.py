"""Decides when two conversations ask the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def normalised(text: str) -> str:
    """The text without what does not change a question: case, and how its white space is laid out."""
    return " ".join(text.casefold().split())


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The normalised text of the conversation; system messages are left out, they are not part of the question."""
    return "\n".join(
        f"{message.get('role')}: {normalised(text_of(message))}"
        for message in messages
        if message.get("role") != "system"
    )


def text_of(message: Mapping[str, Any]) -> str:
    """The message's content as text; content that is not text becomes JSON."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
