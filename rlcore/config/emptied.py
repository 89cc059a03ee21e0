"""Layers that empty a mapping of named entries, or remove one entry: merging alone only adds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlcore.config.layers import Layer, leaves
from rlcore.config.schema import entries_of, hint_at, section_of
from rlcore.config.sections import RunConfig
from rlcore.errors import ConfigError, nearest

EMPTY = (None, "")
"""Values of an override such as `eval.sources=` or `eval.sources=null`; `eval.sources={}` is an empty mapping."""


def emptied(layers: Sequence[Layer], plugins: Mapping[str, type[Any]]) -> list[Layer]:
    """The layers, lowest first, without what a higher one empties.

    A mapping `dict[str, X]` is emptied by {}, null or no value; an entry that is a section is removed by null.
    ConfigError for the removal of an entry that no lower layer has. `plugins` are sections, which {} leaves as they
    are.
    """
    result: list[Layer] = []
    for layer in layers:
        for key, value in leaves(layer.values):
            if key == "plugins" or (value not in EMPTY and value != {}):
                continue
            above, _, name = key.rpartition(".")
            if entries_of(hint_at(key, RunConfig, plugins)) is not None:
                result = [replace(lower, values=_without(lower.values, key)) for lower in result]
                layer = replace(layer, values=_without(layer.values, key, {}))
            elif value is None and above != "plugins" and _holds_sections(hint_at(above, RunConfig, plugins)):
                names = sorted({name for lower in result for name in _entries(lower.values, above)})
                if name not in names:
                    raise ConfigError(f"{key}: null removes an entry ({layer.origin}); {nearest(name, names)}")
                result = [replace(lower, values=_without(lower.values, key)) for lower in result]
                layer = replace(layer, values=_without(layer.values, key))
        result.append(layer)
    return result


def _holds_sections(hint: Any) -> bool:
    entries = entries_of(hint)
    return entries is not None and section_of(entries) is not None


def _entries(values: Mapping[str, Any], key: str) -> Sequence[str]:
    """The names of the entries that the values have at this key."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return [name for name, entry in found.items() if entry is not None] if isinstance(found, Mapping) else []


def _without(values: Mapping[str, Any], key: str, instead: Any = None) -> dict[str, Any]:
    """The values without this key, or with another value there."""
    first, _, rest = key.partition(".")
    result = {name: value for name, value in values.items() if rest or name != first}
    if rest and isinstance(result.get(first), Mapping):
        result[first] = _without(result[first], rest, instead)
    elif not rest and instead is not None:
        result[first] = instead
    return result
