"""Private copies for foreign code: its changes stay its own.

Of a value, all that cannot be written to is shared and the rest is copied: lists, dicts and what else a row of data or
an agent loop brought. What a trajectory is made of is read-only, so that most are shared as they are.
"""

import pickle
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from rlcore.types import FinishReason, FrozenDict, Prompt, Trajectory, TrajectoryId

T = TypeVar("T")

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, TrajectoryId, FinishReason})
"""Exactly these types: a subclass may hold something that can be written to."""


def private_copy(value: T) -> T:
    """The value, with copies in place of all in it that could be written to; those must pickle."""
    copied: Any = _private(value)
    return copied  # type: ignore[no-any-return]


def _private(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS or (kind is np.ndarray and not value.flags.writeable and not value.dtype.hasobject):
        return value
    # What holds itself does so by way of a list, a dict or an object, so these kinds cannot go round for ever.
    if kind is tuple:
        if _ATOMS.issuperset(map(type, value)):
            return value
        found = _replacements(enumerate(value))
        return tuple(found.get(index, part) for index, part in enumerate(value)) if found else value
    if kind is FrozenDict:
        if _ATOMS.issuperset(map(type, value.values())):
            return value
        found = _replacements(value.items())
        return FrozenDict({**value, **found}) if found else value
    if kind is Trajectory or kind is Prompt:
        found = _replacements(value.__dict__.items())
        return replace(value, **found) if found else value
    if isinstance(value, (Enum, np.number, np.bool_)):
        return value
    return pickle.loads(pickle.dumps(value))


def _replacements(held: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Of pairs of a key and what is held by it, those whose value is to be replaced, with the copy."""
    found = {}
    for key, value in held:
        if type(value) not in _ATOMS and (copied := _private(value)) is not value:
            found[key] = copied
    return found
