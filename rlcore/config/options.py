"""`option()`: a field of a configuration dataclass that says when it has an effect."""

from dataclasses import field
from typing import Any, cast


def option(default: Any, *, used_when: str) -> Any:
    """A field with a default that matters only while `used_when` holds.

    `used_when` is one comparison, '<key> == <literal>' or '<key> != <literal>'. A key with no dot is a field of the
    same section; a dotted key starts at the top of the configuration.
    """
    metadata = {"used_when": used_when}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: cast(Any, type(default)(default)), metadata=metadata)
    return field(default=default, metadata=metadata)
