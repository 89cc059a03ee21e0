"""Checks of the data that plugins hand over, called where that data is made.

Each raises OfferError with class, field, value and what is needed; the boundary around the plugin's code adds the
plugin's name.
"""

import math
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from rlcore.errors import CALLED, OfferError, PluginError, boundary, shown
from rlcore.errors.checks.interfaces import Kind, kind_of, refuses
from rlcore.errors.checks.targets import FORM, well_formed

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def listed(result: object, kind: type[T], whose: str) -> Sequence[T]:
    """The result of a plugin's function; PluginError unless it is a list or tuple of `kind`."""
    if not isinstance(result, (list, tuple)):
        if isinstance(result, Coroutine):
            result.close()
        raise PluginError(f"{whose} returned {type(result).__name__}; needs a list or tuple of {kind.__name__}")
    with boundary(whose, PluginError, CALLED):  # a subclass of list may override iteration
        items = list(result)
    for member in items:
        if not isinstance(member, kind):
            raise PluginError(f"{whose} returned a list with {shown(member)}; needs {kind.__name__}")
    return items


def refuse(made: object, field: str, needs: str) -> None:
    """Raise the OfferError about one field of an offer."""
    raise OfferError(f"{_who(made)}: {field} is {shown(getattr(made, field))}; needs {needs}")


def check_names(made: object, *fields: str) -> None:
    """Require names, because they become parts of paths and of metric names."""
    for field in fields:
        value = getattr(made, field)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            refuse(made, field, "a name of letters, digits, '.', '_' and '-'")


def check_texts(made: object, *fields: str) -> None:
    """Require one line of text that is not empty."""
    for field in fields:
        value = getattr(made, field)
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            refuse(made, field, "one line of text, not empty")


def check_flags(made: object, *fields: str) -> None:
    """Require True or False, not another value that counts as one."""
    for field in fields:
        if not isinstance(getattr(made, field), bool):
            refuse(made, field, "True or False")


def check_whole(made: object, least: int, *fields: str) -> None:
    """Require whole numbers of at least `least`; booleans are not numbers."""
    for field in fields:
        value = getattr(made, field)
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            refuse(made, field, f"a whole number of at least {least}")


def check_numbers(made: object, least: float | None, *fields: str, most: float = math.inf) -> None:
    """Require finite numbers of at least `least`, unless that is None, and at most `most`; booleans are not numbers."""
    for field in fields:
        value = getattr(made, field)
        if not is_finite(value) or (least is not None and value < least) or value > most:
            bounds = (
                ""
                if least is None
                else f" of at least {least:g}" + (f", at most {most:g}" if math.isfinite(most) else "")
            )
            refuse(made, field, f"a finite number{bounds}")


def check_above(made: object, bound: float, field: str) -> None:
    """Require a finite number above `bound`."""
    value = getattr(made, field)
    if not is_finite(value) or value <= bound:
        refuse(made, field, f"a finite number above {bound:g}")


def is_finite(value: Any) -> bool:
    """True for a number that a float holds; booleans are not numbers."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def check_text_choice(made: object, field: str, choices: Sequence[str]) -> None:
    """Require one of the texts in `choices`."""
    if getattr(made, field) not in choices:
        refuse(made, field, f"one of {', '.join(map(str, choices))}")


def check_choice(made: object, field: str, choices: type[Enum]) -> None:
    """Require a member of an enumeration, not its text."""
    if not isinstance(getattr(made, field), choices):
        refuse(made, field, f"one of {_members(choices)}")


def check_choices(made: object, field: str, choices: type[Enum]) -> None:
    """Require a set of members of an enumeration."""
    value = getattr(made, field)
    if not isinstance(value, (set, frozenset)) or not all(isinstance(part, choices) for part in value):
        refuse(made, field, f"a frozenset of {_members(choices)}")


def check_is(made: object, field: str, kind: type[Any], *, optional: bool = False) -> None:
    """Require an instance of a class, or None if `optional`."""
    value = getattr(made, field)
    if not isinstance(value, kind) and not (optional and value is None):
        refuse(made, field, f"a {kind.__name__}{' or None' if optional else ''}")


def check_frozen(made: object, field: str) -> None:
    """Require None or an instance of a frozen dataclass."""
    value = getattr(made, field)
    parameters = getattr(type(value), "__dataclass_params__", None)
    if value is not None and not (parameters and parameters.frozen):
        refuse(made, field, "an instance of a frozen dataclass, or None")


def check_subclass(made: object, field: str, base: type[Any]) -> None:
    """Require a class that inherits from `base`; a registered one does not count."""
    value = getattr(made, field)
    if not isinstance(value, type) or base not in value.__mro__:
        refuse(made, field, f"a subclass of {base.__module__}.{base.__name__}")


def check_settings(made: object, field: str) -> None:
    """Require a frozen dataclass: the class, not an instance."""
    value = getattr(made, field)
    if not isinstance(value, type) or not is_dataclass(value) or not value.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        refuse(made, field, "a frozen dataclass")


def check_target(made: object, field: str) -> None:
    """Require the form 'module:attr'; the target itself is not checked."""
    if not well_formed(getattr(made, field)):
        refuse(made, field, FORM)


def check_targets(made: object, field: str) -> None:
    """Require targets by purpose."""
    value = getattr(made, field)
    if not isinstance(value, Mapping):
        refuse(made, field, "a mapping of purposes to targets, {'loss': 'module:attr'}")
    for purpose, target in value.items():
        if not isinstance(purpose, str) or not purpose or not well_formed(target):
            found = f"{shown(purpose)}: {shown(target)}"
            raise OfferError(f"{_who(made)}: {field} has {found}; needs a purpose and {FORM}")


def check_mapping(made: object, field: str) -> None:
    """Require a mapping with dotted keys."""
    value = getattr(made, field)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        refuse(made, field, "a mapping of dotted keys to values, {'reward.manager': 'mine'}")


def check_distinct(made: object, field: str) -> None:
    """Require a tuple or list of names, each once."""
    value = getattr(made, field)
    names = value if isinstance(value, (tuple, list)) else [None]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        refuse(made, field, "a tuple of names, each once")


def check_call(made: object, field: str, arguments: Sequence[str]) -> None:
    """Require a plain function that can be called with these positional arguments."""
    value = getattr(made, field)
    if not callable(value):
        refuse(made, field, f"a function of ({', '.join(arguments)})")
    if kind_of(value) in (Kind.ASYNC, Kind.GENERATOR):
        raise OfferError(f"{_who(made)}: {field} is {kind_of(value)}; needs {Kind.PLAIN}")
    if problem := refuses(value, arguments):
        raise OfferError(f"{_who(made)}: {field} {problem}")


def _members(choices: type[Enum]) -> str:
    return ", ".join(f"{choices.__name__}.{choice.name}" for choice in choices)


def _who(made: object) -> str:
    """The class and name of an offer: RewardFunction 'half', WorkerRequest 'judge'."""
    role = getattr(getattr(made, "role", None), "name", None)
    known = getattr(made, "name", None) or role or getattr(made, "backend", None)
    return f"{type(made).__name__} '{known}'" if isinstance(known, str) and known.isprintable() else type(made).__name__
