"""Runs in the child process of sync tools and environments: functions and objects, independent of the run."""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlcore.contracts.named_classes import unusable
from rlcore.errors import ChildError, boundary
from rlcore.imports import import_target
from rlcore_agent_loop.tools.calls import as_text, check_size

FUNCTION, OBJECTS = "function", "objects"
"""Kinds of tools: called, or one object per sample."""


def kind_of(target: Any) -> tuple[str, bool]:
    """(kind of a tool, whether it is async)."""
    if isinstance(target, type):
        return OBJECTS, inspect.iscoroutinefunction(getattr(target, "execute", None))
    return FUNCTION, inspect.iscoroutinefunction(target)


class StatefulTool:
    """The methods of a tool that is a class; `execute` takes the arguments of a call."""

    def create(self, columns: Mapping[str, Any]) -> Any: ...

    def execute(self, **arguments: Any) -> Any: ...

    def release(self) -> Any: ...


def check_usable(
    key: str, target: Any, interface: type[Any], required: Sequence[str], kwargs: Mapping[str, Any]
) -> None:
    """ChildError, naming the setting, for a target that cannot be called, or a class that every sample would fail with.

    A function may make objects of any class, so nothing is known of them.
    """
    found: tuple[str, ...] = ()
    if isinstance(target, type):
        found = unusable(target, interface, required)
        with suppress(ValueError):  # a class of C without a text signature
            try:
                inspect.signature(target).bind(**kwargs)
            except TypeError as cause:
                found = (*found, f"it cannot be made with the arguments ({', '.join(kwargs)}): {cause}")
    elif not callable(target):
        found = (f"found a value of the type {type(target).__name__}; needs a class or a function",)
    if found:
        name = f"{target.__qualname__}: " if isinstance(target, type) else ""
        raise ChildError(f"{key}: {name}{'; '.join(found)}")


class Toolbox:
    """Holds functions, and the objects of samples; `rlcore.cluster.child_main` serves its methods."""

    def __init__(self, tools: Mapping[str, str], environment: str, environment_kwargs: Mapping[str, Any]) -> None:
        self._tools = {name: import_target(target) for name, target in tools.items()}
        self._environment = import_target(environment) if environment else None
        self._environment_kwargs = environment_kwargs
        self._objects: dict[tuple[str, str], Any] = {}

    def kinds(self) -> dict[str, tuple[str, bool]]:
        """`kind_of` for each tool; ChildError for one that could not be called."""
        for name, target in self._tools.items():
            check_usable(f"plugins.agent_loop.tools.{name}.fn", target, StatefulTool, ["execute"], {})
        return {name: kind_of(target) for name, target in self._tools.items()}

    def environment_is_async(self, interface: type[Any]) -> bool:
        """True if the environment runs on the run's event loop; ChildError for one that could not be used."""
        key, kwargs = "plugins.agent_loop.environment.fn", self._environment_kwargs
        check_usable(key, self._environment, interface, ["reset", "step"], kwargs)
        return inspect.iscoroutinefunction(getattr(self._environment, "step", None))

    def call(self, name: str, arguments: Mapping[str, Any], max_chars: int) -> str:
        """The function's result as text, cut off before it crosses the pipe."""
        return as_text(self._tools[name](**arguments), max_chars)

    def create(self, name: str, sample: str, columns: Mapping[str, Any]) -> None:
        """Create the sample's object."""
        new, pending = created(self._tools[name], columns)
        finished(pending)
        self._objects[sample, name] = new

    def execute(self, name: str, sample: str, arguments: Mapping[str, Any], max_chars: int) -> str:
        """The result of a call on the sample's object, as text."""
        return as_text(self._objects[sample, name].execute(**arguments), max_chars)

    def reset(self, sample: str, prompt: Any, seed: int, max_messages: int, max_chars: int) -> Any:
        """The opening messages of the sample's environment, size-checked before they cross the pipe."""
        if self._environment is None:
            raise ChildError("there is no environment")
        self._objects[sample, ""] = self._environment(**self._environment_kwargs)
        found = finished(self._objects[sample, ""].reset(prompt, seed))
        check_size("reset returned", found, None, max_messages, max_chars)
        return found

    def step(self, sample: str, messages: Sequence[Mapping[str, Any]], max_messages: int, max_chars: int) -> Any:
        """The environment's answer, size-checked like `reset`'s."""
        found = finished(self._objects[sample, ""].step(messages))
        messages, info = getattr(found, "messages", ()), getattr(found, "info", None)
        check_size("step returned", messages, info, max_messages, max_chars)
        return found

    def release(self, sample: str) -> None:
        """Release the sample's objects; an error of one does not skip the others."""
        mine = [key for key in self._objects if key[0] == sample]
        problems = []
        for key in mine:
            done = self._objects.pop(key)
            # An environment may have a method `release` that belongs to its game.
            release = (key[1] and getattr(done, "release", None)) or getattr(done, "close", None)
            if callable(release):
                try:
                    with boundary(key[1] or "environment", ChildError):
                        finished(release())
                except ChildError as error:
                    problems.append(str(error))
        if problems:
            raise ChildError("; ".join(problems))


def created(cls: Any, columns: Mapping[str, Any]) -> tuple[Any, Any]:
    """(an object for one sample, the result of its `create`, which may be awaitable)."""
    new = cls()
    create = getattr(new, "create", None)
    return new, create(columns) if callable(create) else None


def finished(value: Any) -> Any:
    """The value; a coroutine is run on a fresh loop."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
