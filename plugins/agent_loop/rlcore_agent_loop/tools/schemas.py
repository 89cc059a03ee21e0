"""Python functions as tool schemas, from their type hints and docstrings."""

from types import MethodType
from typing import Any

from rlcore.errors import ConfigError, boundary


def schema_of(name: str, target: Any) -> dict[str, Any]:
    """The OpenAI-style schema of a function, or of a class's `execute`, under the tool's name.

    ConfigError naming the tool when a type hint or an entry of the docstring's `Args:` is missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    with boundary(f"plugins.agent_loop.tools.{name}: its schema", ConfigError):
        function = target
        if isinstance(target, type):
            execute: Any = target
            # A bound method, so that `self` is not an argument; the object itself is never used.
            function = MethodType(execute.execute, object())
        schema: dict[str, Any] = get_json_schema(function)
    return {**schema, "function": {**schema["function"], "name": name}}
