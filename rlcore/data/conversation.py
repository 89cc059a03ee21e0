"""Compares the questions of conversations."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def normalised(text: str) -> str:
    """The text without differences that do not change a question: case and layout of white space."""
    return " ".join(text.casefold().split())


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The normalised text of the conversation, without system messages, which are not part of the question."""
    return "\n".join(
        f"{message.get('role')}: {normalised(text_of(message))}"
        for message in messages
        if message.get("role") != "system"
    )


def text_of(message: Mapping[str, Any]) -> str:
    """The message's content as text; content that is not text becomes JSON."""
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
