"""Messages from clients of the OpenAI protocol, normalised so that they can be compared."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlcore.errors import RlcoreError
from rlcore_agent_loop.tools.calls import ToolCall, encodable_text, is_deeper, parts_of

Plain = dict[str, Any]


class BadRequest(RlcoreError):
    """A request that cannot be answered; the client gets the reason."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


MAX_DEPTH = 64
"""Levels of lists and objects in a request. Deeper ones would exceed the recursion limit."""


def check_texts(body: Any) -> None:
    """BadRequest if a request is nested too deeply, or contains half of a surrogate pair (text that is not Unicode)."""
    level = [body]
    for _ in range(MAX_DEPTH):
        texts = [text for value in level for text in _texts(value) if not text.isascii()]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as cause:
            raise BadRequest("the body contains half of a surrogate pair; needs Unicode text") from cause
        level = [inner for value in level for inner in parts_of(value)]
        if not level:
            return
    raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep")


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return value if isinstance(value, dict) else ()


def num_chars(value: Any) -> int:
    """Characters in all texts of a value of JSON; every other value counts as one."""
    level, num = [value], 0
    while level:
        num += sum(max(1, sum(map(len, _texts(value)))) if isinstance(value, (str, dict)) else 1 for value in level)
        level = [inner for value in level for inner in parts_of(value)]
    return num


def normalised(messages: Any) -> list[Plain]:
    """The messages, each with its role, its content as text, and other meaningful keys; BadRequest otherwise."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages: needs a list of at least one")
    return [_message(message) for message in messages]


def _message(message: Any) -> Plain:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("messages: each needs a role")
    role = "system" if message["role"] == "developer" else message["role"]
    plain: Plain = {"role": role, "content": _text(message.get("content"))}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise BadRequest("messages: tool_calls needs a list")
        plain["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return encodable_text(content or "")
    if not isinstance(content, list):
        raise BadRequest(f"messages: found a content that is {type(content).__name__}; needs text")
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise BadRequest("messages: contents other than text are not served")
    return encodable_text("".join(str(part) for part in parts))


def _call(call: Any) -> Plain:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("messages: a tool call needs a function with a name")
    arguments = function.get("arguments") or "{}"
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {
            "name": function["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Plain]:
    """The messages as chat templates expect them: arguments of calls as objects."""
    return [{**message, "tool_calls": [_opened(call) for call in message["tool_calls"]]} if "tool_calls" in message
            else dict(message) for message in messages]  # fmt: skip


def _opened(call: Mapping[str, Any]) -> Plain:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        arguments = {}
    opened = arguments if isinstance(arguments, dict) and not is_deeper(arguments, MAX_DEPTH) else {}
    return {**call, "function": {**call["function"], "arguments": opened}}


def answer(text: str, calls: Sequence[ToolCall], number: int) -> Plain:
    """The policy's answer in the protocol's form. Calls that are invalid or not JSON stay in the text."""
    good = [call for call in calls if not call.problem]
    try:
        arguments = [json.dumps(dict(call.arguments)) for call in good]
    except (TypeError, ValueError, RecursionError):
        good = []
    if not good or len(good) != len(calls):
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments[place]},
            }
            for place, call in enumerate(good)
        ],
    }
