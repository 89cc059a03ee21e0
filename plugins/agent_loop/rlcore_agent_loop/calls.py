"""Finds tool calls in what the policy said. Its words are data: they are parsed as JSON and never evaluated."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 8
"""Calls of one turn; further ones are refused."""
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call as it was asked for."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    """Why it cannot be made; empty if it can."""


def find_calls(text: str) -> list[ToolCall]:
    """The calls in a response, in order, those that cannot be made with the reason."""
    found = [_parse(body) for body in _CALL.findall(text)]
    return [each if index < MAX_CALLS else _refused(f"more than {MAX_CALLS} calls") for index, each in enumerate(found)]


def _parse(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as cause:
        return _refused(f"the call is not JSON: {cause}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _refused("the call has no name")
    arguments = call.get("arguments") or {}
    if not isinstance(arguments, dict):
        return _refused("the arguments are no object")
    return ToolCall(call["name"], arguments)


def _refused(problem: str) -> ToolCall:
    return ToolCall("", {}, problem)
