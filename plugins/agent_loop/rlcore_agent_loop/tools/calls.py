"""Tool calls as the policy asked for them, and their results as it gets to see them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.errors import ChildError


@dataclass(frozen=True)
class ToolCall:
    """A call as it was asked for."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Why it cannot be made; empty if it can."""


def refused(problem: str) -> ToolCall:
    """A call that cannot be made."""
    return ToolCall("", {}, problem)


def as_text(value: Any, max_chars: int) -> str:
    """A tool's result as text: a string as it is, numbers and what JSON knows as JSON, None as nothing.

    ChildError for anything else. Longer results are cut off, and say so; what no tokenizer could encode is replaced.
    """
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = str.__str__(value)  # a class derived from it would run code where it is unpickled
    else:
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as cause:
            raise ChildError(
                f"the result is no text: {type(value).__name__} ({cause}); needs text, a number or what JSON knows"
            ) from cause
    text = encodable_text(text)
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... ({len(text) - max_chars} characters cut off)"


def encodable_text(text: str) -> str:
    """The text, with what no tokenizer could encode replaced."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def encodable(value: Any) -> Any:
    """Mappings and lists as they are, with texts in which what no tokenizer could encode is replaced."""
    if isinstance(value, str):
        return encodable_text(value)
    if isinstance(value, Mapping):
        return {name: encodable(inner) for name, inner in value.items()}
    return [encodable(part) for part in value] if isinstance(value, (list, tuple)) else value
