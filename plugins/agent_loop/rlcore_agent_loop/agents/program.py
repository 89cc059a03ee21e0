"""Runs an agent in its child process: a function or object that receives the policy's address."""

import asyncio
import inspect
import os
from collections.abc import Mapping
from typing import Any

from rlcore.contracts.scorer import as_plain, number
from rlcore.errors import ChildError, ConfigError, boundary, shown
from rlcore.imports import import_target
from rlcore_agent_loop.tools.calls import as_text

MAX_CHARS = 100_000
"""Characters kept of a text; the rest is cut off."""
ARGUMENTS = ("base_url", "api_key", "model", "messages", "question", "columns")
"""Arguments that an agent may take, by name."""


class Program:
    """Holds the function, or the object made from a class. `rlcore.cluster.child_main` serves `run`, several calls at a
    time unless `alone`."""

    def __init__(self, target: str, kwargs: Mapping[str, Any], alone: bool) -> None:
        self._function, self._kwargs, self._alone = import_target(target), dict(kwargs), alone
        if isinstance(self._function, type):
            with boundary(
                f"plugins.agent_loop.agent.fn: {target}, made with plugins.agent_loop.agent.kwargs", ConfigError
            ):
                self._function, self._kwargs = self._function(**kwargs), {}
        parameters = inspect.signature(self._function).parameters.values()
        self._open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}
        required = {
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }
        if unknown := sorted(required - set(ARGUMENTS) - set(self._kwargs)):
            raise ConfigError(
                f"plugins.agent_loop.agent.fn: {target} needs {', '.join(unknown)}; given are {', '.join(ARGUMENTS)} "
                "and plugins.agent_loop.agent.kwargs"
            )
        if not alone and not self._open and not {"base_url", "api_key"} <= self._names:
            raise ConfigError(
                f"plugins.agent_loop.agent.fn: {target} takes no base_url and api_key; needs both, or "
                "plugins.agent_loop.agent.threads=1, which sets OPENAI_BASE_URL and OPENAI_API_KEY instead"
            )

    def run(self, arguments: Mapping[str, Any]) -> float | str | None:
        """The function's result: a reward, a final text, or None. A coroutine runs on a fresh loop."""
        if self._alone:
            os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = arguments["base_url"], arguments["api_key"]
        named = {name: value for name, value in arguments.items() if self._open or name in self._names}
        value = self._function(**named, **self._kwargs)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if value is None or isinstance(value, str):
            return None if value is None else as_text(value, MAX_CHARS)  # a foreign class would run its code in the run
        reward = number(as_plain(value))
        if isinstance(reward, float):
            return reward
        found = shown(value) if isinstance(value, (int, float)) else type(value).__name__
        raise ChildError(f"the agent returned {found}; needs a finite reward, a text or None")
