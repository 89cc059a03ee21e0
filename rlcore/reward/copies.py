"""What somebody else's code may be given: whatever it does to it, nobody else sees it.

Of a value, all that cannot be written to is shared and the rest is copied: lists, dicts and what else a row of data or
an agent loop brought. What a trajectory is made of is read-only, so that most are shared as they are.
"""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from rlcore.types import FrozenDict, Prompt, Trajectory, TrajectoryId

T = TypeVar("T")

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, TrajectoryId})
"""Exactly these types: a subclass may hold something that can be written to."""


def private_copy(value: T) -> T:
    """The value, with copies in place of all in it that could be written to; those must pickle."""
    copied: Any = _private(value)
    return copied  # type: ignore[no-any-return]


def _private(value: Any) -> Any:
    kind = type(value)
    if kind in _ATOMS or (kind is np.ndarray and not value.flags.writeable and value.dtype != np.object_):
        return value
    # What holds itself does so by way of a list, a dict or an object, so these kinds cannot go round for ever.
    if kind is tuple:
        found = _replacements(dict(enumerate(value)))
        return tuple(found.get(index, each) for index, each in enumerate(value)) if found else value
    if kind is FrozenDict:
        found = _replacements(value)
        return FrozenDict(dict(value) | found) if found else value
    if kind is Trajectory or kind is Prompt:
        found = _replacements(value.__dict__)
        return replace(value, **found) if found else value
    if isinstance(value, (Enum, np.number, np.bool_)):
        return value
    return pickle.loads(pickle.dumps(value))


def _replacements(held: Mapping[Any, Any]) -> dict[Any, Any]:
    """Of what is held by these keys, whatever is to be replaced by a copy."""
    found = {}
    for key, value in held.items():
        if type(value) not in _ATOMS and (copied := _private(value)) is not value:
            found[key] = copied
    return found
