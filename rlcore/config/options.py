"""`option()`: a field of a configuration dataclass with its condition and its bounds.

Sections of the core and of plugins use it; `rlcore.config.load` enforces both.

The language of `used_when` is one comparison, '<key> == <literal>', '<key> != <literal>', '<key> in <tuple>' or
'<key> not in <tuple>'. A key with no dot is a field of the same section; a dotted key starts at the top of the
configuration. The literal is a Python literal: a string, number, True, False, None, () or {}, or a tuple of them.
Nothing is ever evaluated.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

_COMPARISON = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(==|!=|\bin\b|\bnot in\b)\s*(.+?)\s*")
_BOUNDS = ("at_least", "above", "at_most", "below")


def option(
    default: Any,
    *,
    used_when: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    on_cuda: str = "",
) -> Any:
    """A field with a default, a condition under which it matters, and bounds of its number.

    Setting the field in a file or an override while `used_when` does not hold is a ConfigError, unless a later file or
    override sets the key of `used_when`. So is a number out of bounds. `at_least` and `at_most` include their bound,
    `above` and `below` do not. `on_cuda` names the key, such as `actor.dtype`, whose value is the default on a GPU if
    `used_when` holds.
    """
    bounds = zip(_BOUNDS, (at_least, above, at_most, below), strict=True)
    metadata: dict[str, Any] = {name: bound for name, bound in bounds if bound is not None}
    if used_when:
        condition_of(used_when, "option")
        metadata["used_when"] = used_when
    if on_cuda:
        metadata["on_cuda"] = on_cuda
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: cast(Any, type(default)(default)), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Condition:
    """A parsed `used_when`."""

    key: str
    """The dotted key, from the top of the configuration."""
    operator: str
    literal: Any

    def holds(self, value: Any) -> bool:
        """True if the condition is true when `key` has this value."""
        found = value in self.literal if self.operator in ("in", "not in") else bool(value == self.literal)
        return found is (self.operator in ("==", "in"))

    def __str__(self) -> str:
        return f"{self.key} {self.operator} {self.literal!r}"


def condition_of(used_when: str, section: str) -> Condition:
    """`used_when` of a field in `section` (dotted); ValueError if it is not in the language above."""
    match = _COMPARISON.fullmatch(used_when)
    if match is None:
        raise ValueError(
            f"used_when={used_when!r}: needs '<key> == <literal>', '<key> != <literal>', '<key> in <tuple>' or "
            "'<key> not in <tuple>'"
        )
    key, operator, literal = match.groups()
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError) as cause:
        raise ValueError(f"used_when={used_when!r}: {literal!r} is not a Python literal") from cause
    if operator in ("in", "not in") and not isinstance(value, tuple):
        raise ValueError(f"used_when={used_when!r}: {literal!r} is not a tuple")
    return Condition(key if "." in key or not section else f"{section}.{key}", operator, value)


def needed(metadata: Mapping[str, Any]) -> str:
    """The bounds of a field in words, such as 'at least 0 and below 1'; empty without bounds."""
    words = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
    return " and ".join(f"{words[name]} {metadata[name]:g}" for name in _BOUNDS if name in metadata)


def within(value: float, metadata: Mapping[str, Any]) -> bool:
    """True if a number is within the bounds of its field."""
    return (
        value >= metadata.get("at_least", value)
        and value <= metadata.get("at_most", value)
        and ("above" not in metadata or value > metadata["above"])
        and ("below" not in metadata or value < metadata["below"])
    )
