"""Checks the results of calls against their declarations: a type, an awaitable, an async generator."""

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from rlcore.errors import PluginError, RlcoreError, WorkerError

_WIDER: dict[Any, type] = {float: Real, int: Integral}
"""Wider types, so that numpy's numbers count as numbers."""
_NAMES: dict[type, str] = {NoneType: "None", Real: "float", Integral: "int"}
_NEVER_RAN = ("async_generator", "generator")
"""Types that a method with `yield` returns immediately, before its first line runs."""


def kind(value: object) -> str:
    """A refused value in the words of errors: 'None', or its type.

    Closes a coroutine, because Python would warn that it was never awaited.
    """
    if inspect.iscoroutine(value):
        value.close()
    return "None" if value is None else type(value).__name__.replace("_", " ")


def checked_result(where: str, method: Callable[..., Any], result: Any) -> Any:
    """The result of a worker's method; WorkerError naming `where` unless the interface's `method` declares its type.

    Accepts any result if the interface declares no type, or one that only a type checker can check. A method that
    declares None may return anything but a generator, whose code never ran.
    """
    due = _declared(method)
    if due is None or isinstance(result, due):
        return result
    if due == (NoneType,) and type(result).__name__ not in _NEVER_RAN:
        return result
    needed = " or ".join(_NAMES.get(cls, cls.__name__) for cls in due)
    raise WorkerError(f"{where} returned {kind(result)}; needs {needed}, as {method.__qualname__}() declares")


def awaitable(who: str, found: Any) -> Awaitable[Any]:
    """The awaitable that an async method of a component returned; PluginError naming `who` for anything else."""
    if inspect.isawaitable(found):
        return found
    raise PluginError(f"{who} returned {kind(found)} at once; needs an `async def`, which is awaited")


def plain(who: str, found: Any, due: type | tuple[type, ...], needed: str) -> Any:
    """The result of a plain method of a component; PluginError naming `who` unless it has the type `due`."""
    if isinstance(found, due):
        return found
    raise PluginError(f"{who} returned {kind(found)}; needs {needed}")


def as_stream(who: str, found: Any, error: type[RlcoreError]) -> AsyncGenerator[Any, None]:
    """The generator of a streaming method; `error` naming `who` unless it is an async generator."""
    if hasattr(found, "__aiter__") and hasattr(found, "aclose"):
        return cast(AsyncGenerator[Any, None], found)
    raise error(f"{who}: returned {kind(found)}; needs an async generator, an `async def` with `yield`")


@functools.cache
def _declared(method: Callable[..., Any]) -> tuple[type, ...] | None:
    """The types that a method may return; None if its annotation names none."""
    try:
        hints = get_type_hints(method)
    except (NameError, TypeError, AttributeError):  # an annotation that only a type checker can resolve
        return None
    return _types(hints["return"]) if "return" in hints else None


def _types(hint: Any) -> tuple[type, ...] | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        found = [_types(argument) for argument in get_args(hint)]
        known = [types for types in found if types is not None]
        return tuple(member for name in known for member in name) if len(known) == len(found) else None
    cls = origin or hint
    if not isinstance(cls, type) or cls in (object, Any) or getattr(cls, "_is_protocol", False):
        return None
    return (_WIDER.get(cls, cls),)
