"""Tool calls as the policy requested them, and their results as the policy sees them."""

import inspect
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.errors import ChildError, shown
from rlcore.types import plain

LARGEST = (2 - 2**-23) * 2.0**127
"""Rewards are float32 in a batch; a larger one would overflow."""
MAX_DEPTH = 32
"""Most levels of nested mappings and lists that an environment may return."""


@dataclass(frozen=True)
class ToolCall:
    """A requested call."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Reason why it cannot be made; empty if it can."""
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Arguments as the policy wrote them, in a format without quotes: `arguments` has what they are as JSON, and those
    that the tool's schema calls a string become these texts."""


def problem_of(call: Any) -> str:
    """The problem of a value that a parser returned, in words; empty for a call. Foreign values may raise."""
    if not isinstance(call, ToolCall):
        return f"{type(call).__name__}; needs rlcore_agent_loop.ToolCall"
    named = isinstance(call.name, str) and isinstance(call.problem, str)
    if (
        not named
        or not isinstance(call.arguments, Mapping)
        or not isinstance(call.texts, Mapping)
        or not all(isinstance(text, str) for text in (*call.arguments, *call.texts.values()))
    ):
        return f"a ToolCall of {shown(call.name)} with {shown(call.arguments)}; needs a name, and arguments by name"
    spelled(call.arguments)
    return ""


def spelled(arguments: Mapping[str, Any]) -> str:
    """The arguments as text, in which the order of their names does not matter."""
    return repr(sorted(arguments.items(), key=lambda pair: pair[0]))


def refused(problem: str) -> ToolCall:
    """A call that cannot be made."""
    return ToolCall("", {}, problem)


def as_text(value: Any, max_chars: int) -> str:
    """A tool's result as text: a string unchanged, other JSON values as JSON, None as an empty string.

    ChildError for anything else. Longer results are cut off and say so; text that cannot be encoded is replaced.
    """
    if value is None:
        text = ""
    elif isinstance(value, str):
        text = str.__str__(value)  # a subclass would run code where it is unpickled
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=_scalar)
        except (TypeError, ValueError, RecursionError) as cause:
            needs = "text, a number or a JSON value"
            if inspect.iscoroutine(value):
                value.close()
                needs = "an `async def` tool, which is awaited, where one calls an async function"
            raise ChildError(f"the result is not text: {type(value).__name__} ({cause}); needs {needs}") from cause
    text = encodable_text(text)
    return text if len(text) <= max_chars else f"{text[:max_chars]} ... ({len(text) - max_chars} characters cut off)"


def _scalar(value: Any) -> Any:
    """A scalar of numpy or torch as Python's; TypeError for anything else."""
    if getattr(value, "ndim", 1) == 0:
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def check_size(what: str, messages: Any, info: Any, max_messages: int, max_chars: int) -> None:
    """ChildError naming the limit when an environment returned more messages or characters than it may."""
    if isinstance(messages, (list, tuple)) and len(messages) > max_messages:
        raise ChildError(
            f"environment.{what} {len(messages)} messages; needs at most "
            f"plugins.agent_loop.environment.max_messages={max_messages}; raise it"
        )
    for name, value in (("messages", messages), ("info", info)):
        if _chars_left(value, max_chars, MAX_DEPTH) < 0:
            raise ChildError(
                f"environment.{what} {name} of more characters than plugins.agent_loop.environment.max_chars="
                f"{max_chars}, or nested more than {MAX_DEPTH} deep; needs less; raise it"
            )


def _chars_left(value: Any, left: int, depth: int) -> int:
    """`left` less the characters in the value; negative once exceeded, or beyond `depth` levels."""
    if not depth:
        return -1
    inner: Any = value if isinstance(value, (list, tuple, set, frozenset)) else ()
    if isinstance(value, Mapping):
        inner = itertools.chain(value, value.values())
    left -= max(1, _length(value))
    for part in inner:
        if left < 0:
            break
        left = _chars_left(part, left, depth - 1)
    return left


def _length(value: Any) -> int:
    """Characters of a text, values of an array, digits of a large integer; 0 for other values."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    return value.size if isinstance(value, np.ndarray) else 0


def is_deeper(value: Any, most: int) -> bool:
    """True if mappings and lists are nested in more than `most` levels, at which recursive code would fail."""
    level = [value]
    for _ in range(most + 1):
        level = [inner for value in level for inner in parts_of(value)]
        if not level:
            return False
    return True


def parts_of(value: Any) -> Iterable[Any]:
    """The values directly within one of JSON."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def encodable_text(text: str) -> str:
    """The text, with characters replaced that no tokenizer could encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def encodable(value: Any) -> Any:
    """The value, with characters replaced that no tokenizer could encode, in all its texts."""
    return plain(value, _encodable_leaf, _encodable_leaf)


def _encodable_leaf(leaf: Any) -> Any:
    return encodable_text(leaf) if isinstance(leaf, str) else leaf
