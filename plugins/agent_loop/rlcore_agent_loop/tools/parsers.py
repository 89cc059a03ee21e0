"""Finds tool calls in a turn of the policy. The text is data: it is parsed, never evaluated.

A parser is a function from the turn's text to the list of calls in it, in order, which may be empty.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlcore_agent_loop.tools.calls import ToolCall, refused

Parser = Callable[[str], Sequence[ToolCall]]
MAX_PARSED_CHARS = 100_000
"""Longer Python-style calls are refused: Python's parser would need too much memory and depth."""
_CALL = re.compile("<tool_call>")
_BETWEEN = re.compile(r"\s*;?\s*")
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")


def hermes(text: str) -> list[ToolCall]:
    """Calls between <tool_call> and </tool_call>: JSON with name and arguments, or Qwen's XML (<function=name>)."""
    bodies = [body for _, body in _closed(_CALL, "</tool_call>", text)]
    # an argument of a call in JSON may hold such a tag
    return [_json(body) if body.lstrip().startswith("{") or "<function=" not in body else _xml(body) for body in bodies]


def _closed(opens: re.Pattern[str], end: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each opening tag with the text up to the next closing one; linear, however many openings are not closed."""
    place = 0
    while (opened := opens.search(text, place)) and (closed := text.find(end, opened.end())) >= 0:
        yield opened, text[opened.end() : closed]
        place = closed + len(end)


def llama3_json(text: str) -> list[ToolCall]:
    """A turn that consists of JSON objects with name and parameters, separated by semicolons."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    found: list[ToolCall] = []
    decoder, place = json.JSONDecoder(), 0
    while text.startswith("{", place):
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as cause:
            return [*found, refused(f"the call is not JSON: {cause}")]
        found.append(_named(value))
        between = _BETWEEN.match(text, end)
        place = between.end() if between else end
    return found


def pythonic(text: str) -> list[ToolCall]:
    """A turn that is one call, or a list of calls, in Python, with literals as keyword arguments: [add(a=1, b=2)]."""
    text = text.strip()
    if not re.match(r"\[?\s*[A-Za-z_][\w.]*\(", text) or text[-1] not in ")]":
        return []
    if len(text) > MAX_PARSED_CHARS:
        return [refused(f"the call has {len(text)} characters; at most {MAX_PARSED_CHARS}")]
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:
        return [refused(f"the call is not Python: {type(cause).__name__}")]
    return [_python(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


PARSERS: dict[str, Parser] = {"hermes": hermes, "llama3_json": llama3_json, "pythonic": pythonic}
"""Parsers by their name in `plugins.agent_loop.parser`."""


def _json(body: str) -> ToolCall:
    try:
        return _named(json.loads(body))
    except (ValueError, RecursionError) as cause:
        return refused(f"the call is not JSON: {cause}")


def _named(call: Any) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return refused("the call has no name")
    arguments = call.get("arguments", call.get("parameters")) or {}
    if not isinstance(arguments, dict):
        return refused("the arguments are not an object")
    return ToolCall(call["name"], arguments)


def _xml(body: str) -> ToolCall:
    match = _FUNCTION.search(body)
    if match is None:
        return refused("the call has no name")
    parameters = _closed(_PARAMETER, "</parameter>", match[2])
    texts = {opened[1]: text.removeprefix("\n").removesuffix("\n") for opened, text in parameters}
    return ToolCall(match[1], {name: _value(text) for name, text in texts.items()}, texts=texts)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _python(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return refused("the call is not a call of a function")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return refused("the call has arguments without a name; needs name=value")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        repr(arguments)  # Python does not write an integer of more than 4300 digits, which may be spelled 0xf...
        return ToolCall(ast.unparse(node.func), arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return refused("an argument is not a literal; needs numbers, strings, lists and the like")
