"""Makes private copies for foreign code, so that its changes have no effect elsewhere.

Read-only parts of a value are shared and the rest is copied: lists, dicts and other mutable objects from rows or agent
loops. Trajectories consist of read-only parts, so most are shared as they are.
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
"""Exactly these types, because a subclass may contain something mutable."""


def private_copy(value: T) -> T:
    """The value with its mutable parts copied; these must pickle."""
    copied: Any = value if _is_read_only(value) else _copied(value)
    return copied  # type: ignore[no-any-return]


def _is_read_only(value: Any) -> bool:
    """True if nothing in the value is mutable, as in most trajectories; checking costs less than copying."""
    left: list[Iterable[Any]] = [(value,)]
    # Cycles need a list, a dict or an object, so these kinds cannot recurse forever.
    for held in left:
        for part in held:
            kind = type(part)
            if kind in _ATOMS:
                continue
            if kind is tuple:
                left.append(part)
            elif kind is FrozenDict:
                left.append(part.values())
            elif kind is np.ndarray:
                if part.flags.writeable or part.dtype.hasobject:
                    return False
            elif kind is Trajectory or kind is Prompt:
                left.append(part.__dict__.values())
            elif not isinstance(part, (Enum, np.number, np.bool_)):
                return False
    return True


def _copied(value: Any) -> Any:
    """The copy of a value with mutable parts."""
    kind = type(value)
    if kind is tuple:
        return tuple(private_copy(part) for part in value)
    if kind is FrozenDict:
        return FrozenDict({key: private_copy(part) for key, part in value.items()})
    if kind is Trajectory or kind is Prompt:
        found = {name: private_copy(part) for name, part in value.__dict__.items()}
        return replace(value, **{name: part for name, part in found.items() if part is not value.__dict__[name]})
    return pickle.loads(pickle.dumps(value))
