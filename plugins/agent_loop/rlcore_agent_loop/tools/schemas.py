"""Schemas of tools: made from the type hints and docstrings of Python functions, and applied to calls."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

from rlcore.errors import ConfigError, boundary, nearest, shown
from rlcore_agent_loop.tools.calls import ToolCall

_TYPES: dict[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
}
"""Types of JSON schemas by the type of the parsed value."""


def schema_of(name: str, target: Any) -> dict[str, Any]:
    """The OpenAI-style schema of a function, or of a class's `execute`, under the tool's name.

    ConfigError naming the tool when a type hint or an entry of the docstring's `Args:` is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if isinstance(target, partial):
        raise ConfigError(
            f"plugins.agent_loop.tools.{name}.fn: found a functools.partial, which has neither a name nor a docstring "
            "that the model could read; needs a function that calls it"
        )
    with boundary(f"plugins.agent_loop.tools.{name}: its schema", ConfigError):
        function = target
        if isinstance(target, type):
            execute: Any = target
            # A bound method, so that `self` is not an argument; the object itself is never used.
            function = MethodType(execute.execute, object())
        schema: dict[str, Any] = get_json_schema(function)
    return {**schema, "function": {**schema["function"], "name": name}}


def typed(call: ToolCall, schemas: Sequence[Any]) -> ToolCall:
    """The call with the policy's text for each argument that its schema calls a string.

    Where the schema also permits the type of the parsed value, as for a text or null, the parsed value stays.
    """
    if not call.texts:
        return call
    properties = _properties(call.name, schemas)
    allowed = {name: _types_of(properties.get(name)) for name in call.texts}
    texts = {
        name: text
        for name, text in call.texts.items()
        if "string" in allowed[name] and not _TYPES.get(type(call.arguments.get(name)), set()) & allowed[name]
    }
    return replace(call, arguments={**call.arguments, **texts})


def mismatch(tool: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """The first way in which the arguments of a call do not fit the schema of `schema_of`, with what is needed.

    Empty if they fit, or without a schema. Values within lists and objects are left to the function, and so is null for
    an argument that may be left out.
    """
    if not schema:
        return ""
    parameters = schema["function"]["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", ())
    for name in arguments:
        if name not in properties:
            return f"{tool} has no argument {shown(name)}; {nearest(name, list(properties))}"
    for name, of in properties.items():
        kinds = _types_of(of)
        needs = f"needs {' or '.join(sorted(kinds))}" if kinds else "needs one"
        if name not in arguments:
            if name in required:
                return f"{tool}: the argument '{name}' is missing; {needs}"
            continue
        value = arguments[name]
        found = _kinds_of(value)
        if kinds and found and not found & kinds and not (value is None and name not in required):
            return f"{tool}: the argument '{name}' is {shown(value)}; {needs}"
        if isinstance(value, str) and value not in of.get("enum", (value,)):
            return f"{tool}: the argument '{name}' is {shown(value)}; needs one of {', '.join(map(str, of['enum']))}"
    return ""


def _kinds_of(value: Any) -> set[str]:
    """The types of JSON schemas that a parsed value has; empty for values that JSON does not have."""
    if isinstance(value, str):
        return {"string"}
    if isinstance(value, tuple):  # of a call in Python
        return {"array"}
    whole = {"integer"} if isinstance(value, float) and value.is_integer() else set()
    return _TYPES.get(type(value), set()) | whole


def takes_any(target: Any) -> bool:
    """True for a function, or a class's `execute`, that takes arguments which its schema does not name."""
    parameters = inspect.signature(getattr(target, "execute", target)).parameters.values()
    return any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters)


def _properties(name: str, schemas: Sequence[Any]) -> Mapping[str, Any]:
    """The schemas of a tool's arguments; empty where they are not known. Schemas of servers and agents are any JSON."""
    for schema in schemas:
        function = schema.get("function") if isinstance(schema, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _types_of(schema: Any) -> set[str]:
    """The types that the schema of an argument permits; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if schema.get("nullable") is True:
        found.add("null")
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list):
            found = found.union(*map(_types_of, choices))
    return found
