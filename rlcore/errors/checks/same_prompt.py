"""Compares the prompt of a trajectory with that of its task: rewards read the trajectory's."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlcore.types import Prompt

_NAMES = tuple(field.name for field in fields(Prompt))


def other_field(one: Prompt, other: Prompt) -> str:
    """Name of the first field that differs; empty: none. A copy that another process sent back is equal."""
    if one is other:
        return ""
    return next((name for name in _NAMES if not _same(getattr(one, name), getattr(other, name))), "")


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (str, bytes, int, float)):
        return one == other or one != one  # NaN
    return True  # an array or an image: comparing it for each sample costs too much
