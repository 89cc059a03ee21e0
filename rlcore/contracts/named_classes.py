"""Checks classes that a configuration names by reference and that need not inherit from the interface they have."""

import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from rlcore.errors.checks.interfaces import (
    Kind,
    declared_members,
    kind_of,
    misspelled,
    underlying,
    wrong_parameters,
)


def unusable(cls: type[Any], interface: type[Any], required: Sequence[str]) -> tuple[str, ...]:
    """The ways in which a class cannot be used as `interface`, as clauses of an error; empty if it can.

    The class may inherit from the interface, or have methods of the same names, plain or async. Of these only those in
    `required` have to be there. Each takes the interface's arguments by position (any, where the interface has `**`),
    and none is a generator. No method has nearly the name of one that the class leaves out: it would never be called.
    """
    members = declared_members(interface)
    found = misspelled(cls, interface, members)
    if not found and not hasattr(cls, "__getattr__"):
        lacking = {name for name in required if not callable(getattr(cls, name, None))}
        lacking |= getattr(cls, "__abstractmethods__", frozenset())
        found += [f"it does not define {', '.join(sorted(lacking))}"] if lacking else []
    for name, declared in sorted(members.items()):
        method = inspect.getattr_static(cls, name, None)
        if method is declared or not isinstance(method, (staticmethod, classmethod, FunctionType)):
            continue
        kind = kind_of(inspect.unwrap(underlying(method)))
        if kind in (Kind.GENERATOR, Kind.STREAM):
            found.append(f"{name}() is {kind}; needs a method that returns")
        elif inspect.getfullargspec(declared).varkw is None and (problem := wrong_parameters(method, declared)):
            found.append(f"{name}{problem}")
    return tuple(found)
