"""Compares a class with the interface that it is offered for, before any of its code runs."""

import functools
import inspect
import sys
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from types import FunctionType
from typing import Any, get_origin, get_type_hints

from rlcore.errors import PluginError, shown

_FUNCTIONS = (FunctionType, functools.partialmethod)
_STREAMS = (AsyncIterator, AsyncGenerator, AsyncIterable)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Kind(StrEnum):
    """The kinds of methods, in the words of errors."""

    PLAIN = "a plain `def`"
    ASYNC = "an `async def`"
    GENERATOR = "a generator"
    STREAM = "an async generator"


def breaches(cls: type[Any], interface: type[Any]) -> tuple[str, ...]:
    """The ways in which `cls` departs from `interface`, each a clause of an error; empty when it conforms.

    A class conforms if it inherits from the interface and has no abstract method left. Every public method of the
    interface is there, callable, of the declared kind (plain, async, async generator), and takes the interface's
    arguments by position. Every property is a property or a value. No method has nearly the name of one that the class
    leaves to the interface: it would never be called. The check instantiates and calls nothing.
    """
    if interface not in cls.__mro__:
        return (f"it does not inherit from {interface.__name__}; needs a subclass (`register` alone adds no methods)",)
    members = declared_members(interface)
    found = [
        f"{name}{problem}"
        for name, declared in sorted(members.items())
        if (problem := _departs(inspect.getattr_static(cls, name, None), declared))
    ]
    found += misspelled(cls, interface, members)
    missing = sorted(name for name in getattr(cls, "__abstractmethods__", ()))
    if missing:
        found.append(f"it is abstract: it does not define {', '.join(missing)}")
    return tuple(found)


def refuses(function: Callable[..., Any], arguments: Sequence[str]) -> str:
    """The reason why `function` cannot be called with these positional arguments.

    Empty if it can be called, or if its signature is unknown.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C without a text signature
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as cause:
        return f"takes {signature}, needs ({', '.join(arguments)}): {cause}"
    return ""


def defines(cls: type[Any], interface: type[Any], *methods: str) -> bool:
    """True if the class has its own version of each of these methods, not only the interface's."""
    ours = [inspect.getattr_static(cls, name, None) for name in methods]
    theirs = [inspect.getattr_static(interface, name, None) for name in methods]
    return all(
        mine is not None and (mine is not default or cls is interface)
        for mine, default in zip(ours, theirs, strict=True)
    )


def not_importable(cls: type[Any]) -> str:
    """The reason why another process cannot import the class by its name; empty if it can."""
    if "<locals>" in cls.__qualname__:
        return "is defined inside a function; define it at the top level of its module"
    if cls.__module__ == "__main__":
        return "is defined in the script that runs; put it into a module"
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls:
        return f"is not what '{cls.__module__}:{cls.__qualname__}' names; give it the name that it can be imported by"
    return ""


def check_product(built: type[Any], interface: type[Any], who: str) -> None:
    """PluginError unless the class that `who` builds conforms to the interface of its slot."""
    if found := breaches(built, interface):
        raise PluginError(f"{who}: builds {_name(built)} as {interface.__name__}, but {'; '.join(found)}")


def product(build: Callable[..., Any]) -> type[Any] | None:
    """The class that `build` returns: `build` itself if it is a class, else its annotation; None if unknown."""
    while isinstance(build, functools.partial):
        build = build.func
    if isinstance(build, type):
        return build
    returns: Any = None
    with suppress(Exception):  # not every annotation can be resolved at run time
        returns = get_type_hints(build).get("return")
    return returns if isinstance(returns, type) and returns is not type(None) else None


def _name(cls: type[Any]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def declared_members(interface: type[Any]) -> dict[str, Any]:
    """The public methods and properties that an interface and its bases declare."""
    members: dict[str, Any] = {}
    for base in reversed(interface.__mro__):
        if base is not object:
            members |= _members_of(base)
    return members


def _members_of(cls: type[Any]) -> dict[str, Any]:
    """The public methods and properties that the class itself defines."""
    kinds = (property, staticmethod, classmethod, *_FUNCTIONS)
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and isinstance(value, kinds)}


def misspelled(cls: type[Any], interface: type[Any], members: dict[str, Any]) -> list[str]:
    """A clause for each method that is one slip away from a method of the interface that the class does not define."""
    held = {name: inspect.getattr_static(cls, name, None) for name in members}
    left = [name for name, declared in members.items() if held[name] is None or held[name] is declared]
    if interface in cls.__mro__:
        written = [base for base in cls.__mro__ if issubclass(base, interface) and base not in interface.__mro__]
    else:  # bases of other modules have methods for other callers
        written = [base for base in cls.__mro__ if base.__module__ == cls.__module__]
    names = sorted({name for base in written for name in _members_of(base) if name not in members})
    return [
        f"it defines {name}(), which nothing calls, and not {near}(); rename it, or begin its name with an underscore"
        for name in names
        for near in left
        if _one_slip(name, near)
    ]


def _one_slip(name: str, due: str) -> bool:
    """True if case, underscores, one letter or the order of two letters are all that differs.

    Another letter in place of one (clone, close) or at the end (states, state) is more often another word.
    """
    if name.replace("_", "").lower() == due.replace("_", "").lower():
        return True
    same = next((at for at, (a, b) in enumerate(zip(name, due, strict=False)) if a != b), min(len(name), len(due)))
    ours, theirs = name[same:], due[same:]
    one_more = (ours[1:] == theirs or ours == theirs[1:]) and name[-1] == due[-1]
    return one_more or (ours[:2] == theirs[1::-1] and ours[2:] == theirs[2:])


def _departs(found: Any, declared: Any) -> str:
    """The difference from the interface's member, as the text that follows the member's name; empty: none."""
    if found is declared:
        return ""
    if isinstance(declared, property):
        callable_ = isinstance(found, (staticmethod, classmethod, *_FUNCTIONS))
        return " is a method; needs a property or a value" if callable_ else ""
    if isinstance(found, (property, functools.cached_property)):
        return " is a property; needs a method"
    if not callable(underlying(found)):
        return f" is {shown(found)}; needs a method"
    return _wrong_kind(underlying(found), underlying(declared)) or wrong_parameters(found, declared)


def underlying(member: Any) -> Any:
    """The function below staticmethod, classmethod and partialmethod."""
    while isinstance(member, (staticmethod, classmethod, functools.partialmethod)):
        member = member.func if isinstance(member, functools.partialmethod) else member.__func__
    return member


def _wrong_kind(found: Callable[..., Any], declared: Callable[..., Any]) -> str:
    due = kind_of(declared)
    kinds = {kind_of(found), kind_of(inspect.unwrap(found))}  # a decorator may hide the kind, or change it
    if due in kinds or (due is Kind.STREAM and Kind.PLAIN in kinds):
        return ""  # a plain function may return another's async generator
    return f"() is {kind_of(found)}; needs {due}"


def kind_of(function: Callable[..., Any]) -> Kind:
    """The kind of a function; a plain one that is annotated to return an async iterator counts as a stream."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isasyncgenfunction(function):
        return Kind.STREAM
    if inspect.iscoroutinefunction(function):
        return Kind.ASYNC
    if inspect.isgeneratorfunction(function):
        return Kind.GENERATOR
    returns = getattr(function, "__annotations__", {}).get("return")
    streams = get_origin(returns) in _STREAMS or (isinstance(returns, str) and returns.startswith("Async"))
    return Kind.STREAM if streams else Kind.PLAIN


def wrong_parameters(found: Any, declared: Any) -> str:
    """The problem with a method's parameters: the interface's have to bind, with and without the optional ones."""
    if isinstance(found, functools.partialmethod):
        return ""  # its bound arguments come between self and the others
    due = [
        parameter
        for parameter in inspect.signature(underlying(declared)).parameters.values()
        if parameter.kind in _POSITIONAL
    ]
    if isinstance(found, staticmethod):
        due = due[1:]
    required = [parameter.name for parameter in due if parameter.default is parameter.empty]
    for names in (required, [parameter.name for parameter in due]):
        if problem := refuses(underlying(found), names):
            return f"() {problem}"
    return ""
