"""Fits a layer to the dataclasses (unknown keys, sections and texts), and describes the values of a type.

The types of the remaining leaves are checked by OmegaConf when `rlcore.config.load` merges.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rlcore.config.layers import NULLS, Layer, leaves
from rlcore.config.names import check_name
from rlcore.config.peer_names import renamed_key
from rlcore.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}

RENAMED: Mapping[str, str] = {"weights": "weight_sync", "ranks": "data_parallel", "union_of": "colocates"}
"""Old and new names of keys in the same section."""


def cached_by_type(function: Callable[P, T]) -> Callable[P, T]:
    """Caches a function's results for the last 256 section types; errors are not cached."""
    return cast(Callable[P, T], lru_cache(maxsize=256)(function))


@cached_by_type
def hints_of(section: type[Any]) -> Mapping[str, Any]:
    """The type of each field of a dataclass."""
    hints = get_type_hints(section)
    return {spec.name: hints[spec.name] for spec in fields(section)}


def section_of(hint: Any) -> type[Any] | None:
    """The dataclass that a hint stands for, `X` or `X | None`."""
    for member in _members(hint):
        if isinstance(member, type) and is_dataclass(member):
            return member
    return None


def entries_of(hint: Any) -> Any | None:
    """The type of the values of `dict[str, X]`; None for any other hint."""
    for member in _members(hint):
        if get_origin(member) is dict:
            return get_args(member)[1]
    return None


def wanted(hint: Any) -> str:
    """The values that a leaf takes, in words."""
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    if get_origin(hint) in (tuple, list):
        return f"a list like [x, y], each of them {wanted(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "keys with values below it, such as {x: 1}"
    members = _members(hint)
    return " or ".join(wanted(member) for member in members) if len(members) > 1 else _WORDS.get(hint, "another type")


def choices_of(hint: Any) -> tuple[str, ...]:
    """The values that a Literal or enum takes; empty for any other hint."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return tuple(member.name for member in hint) if isinstance(hint, type) and issubclass(hint, Enum) else ()


def hint_at(key: str, root: type[Any], plugins: Mapping[str, type[Any]]) -> Any:
    """The type of the value at a dotted key; Any inside free-form values."""
    hint: Any = root
    parts = key.split(".")
    if parts[0] == "plugins" and len(parts) > 2 and parts[1] in plugins:
        hint, parts = plugins[parts[1]], parts[2:]
    for part in parts:
        section, entries = section_of(hint), entries_of(hint)
        inner = Any if entries is None else entries
        hint = inner if section is None else hints_of(section).get(part, Any)
    return hint


def fit(value: Any, hint: Any, key: str, layer: Layer) -> Any:
    """The value in a form that OmegaConf merges, with null sections as empty ones.

    A ConfigError names key, origin and choices.
    """
    section, entries = section_of(hint), entries_of(hint)
    if section is not None:
        return _fit_section(value, section, key, layer)
    if entries is not None:
        return _fit_entries(value, entries, key, layer)
    if layer.key == key and layer.text in NULLS and str in _members(hint) and type(None) not in _members(hint):
        return _null_as_text(key, layer)
    if hint is str and layer.key == key:
        return _as_typed(value, layer)
    if str in _members(hint) and (int not in _members(hint)) and not isinstance(value, (str, type(None))):
        return _text(value, key, layer)
    if get_origin(hint) is tuple and _is_one_text(value, key, layer):
        return [_as_typed(value, layer) if layer.key == key else value]  # where a list is due: track.to=tensorboard
    if get_origin(hint) is tuple and get_args(hint)[0] is str and isinstance(value, (list, tuple)):
        return [child if isinstance(child, str) else _text(child, key, layer, within=True) for child in value]
    return value


def _fit_section(value: Any, section: type[Any], key: str, layer: Layer) -> dict[str, Any]:
    hints = hints_of(section)
    fitted = {}
    for name, child in _mapping(value, key, layer).items():
        below = f"{key}.{name}" if key else name
        if name not in hints and "." in name:
            way = f"a file nests sections: {_nested(below)}"
            raise ConfigError(f"{below}: found a key with '.' in it ({layer.origin}); {way}")
        if name not in hints:
            raise ConfigError(unknown(below, section, layer.origin, child))
        fitted[name] = fit(child, hints[name], below, layer)
    return fitted


def _nested(key: str) -> str:
    """'a: {b: {c: ...}}' for 'a.b.c'."""
    first, *others = key.split(".")
    return f"{first}: {''.join(f'{{{name}: ' for name in others)}...{'}' * len(others)}"


def _fit_entries(value: Any, entries: Any, key: str, layer: Layer) -> Any:
    if section_of(entries) is None:
        if isinstance(value, str) and value.startswith("${"):
            return value
        children = _mapping(value, key, layer)
        if entries is str:
            return {name: fit(child, str, f"{key}.{name}", layer) for name, child in children.items()}
        return dict(children)
    children = _mapping(value, key, layer)
    for name in children:
        check_name(key, name, "an entry")
    return {name: fit(child, entries, f"{key}.{name}", layer) for name, child in children.items()}


def _mapping(value: Any, key: str, layer: Layer) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: found {value!r} ({layer.origin}); needs a section, that is keys with values below it"
        )
    return value


def _as_typed(value: Any, layer: Layer) -> Any:
    """The text of an override, which YAML would cut at ' #' and fold at line breaks; the value of a quoted one."""
    return value if layer.text[:1] in ("'", '"') else layer.text


def _is_one_text(value: Any, key: str, layer: Layer) -> bool:
    """True for a text, also for one that YAML takes for a comment: rollout.stop=###."""
    if isinstance(value, str):
        return not value.startswith("${")
    return layer.key == key and layer.text.startswith("#")


def _null_as_text(key: str, layer: Layer) -> str:
    """A null typed for a text, if it is the backend of that name; ConfigError for any other text, as in a file."""
    if key.rpartition(".")[2] == "backend":
        return layer.text
    quoted = f"""{key}='"{layer.text}"'"""
    raise ConfigError(f"{key}: found null ({layer.origin}); needs text: {key}= for an empty one, {quoted} for the word")


def _text(value: Any, key: str, layer: Layer, *, within: bool = False) -> str:
    """The text of an override as typed; ConfigError in a file and `within` a list, where YAML reads `12e4567` as a
    number."""
    if layer.key == key and not within:
        return layer.text
    raise ConfigError(
        f"{key}: found {value!r}, which YAML does not read as text ({layer.origin}); needs text: quote it"
    )


def unknown(key: str, section: type[Any], origin: str, value: Any = None) -> str:
    """The error about a key that does not exist, with the key to use instead.

    For a peer's name, that is the key of the same meaning; else a near key of its section, or the same name in another
    section. `value` is the value of the key: an unknown section may hold keys that a peer has.
    """
    parent, _, name = key.rpartition(".")
    if RENAMED.get(name, "") in hints_of(section):
        return f"{key}: now {parent}.{RENAMED[name]} ({origin})"
    near = get_close_matches(name, hints_of(section), n=1, cutoff=0.85)
    below = dict(leaves({key: value})) if isinstance(value, Mapping) else {key: None}
    for leaf in below:
        if not near and (renamed := renamed_key(leaf)):
            return f"{leaf}: unknown key ({origin}); {renamed}"
    prefix = f"{parent}." if parent else ""
    for below_it in _every_key(section):
        if below_it.replace(".", "_") == name:
            return f"{key}: unknown key ({origin}); did you mean '{prefix}{below_it}'?"
    others = () if parent else _every_key(section)
    elsewhere = [other for other in others if other.rpartition(".")[2] == name] or get_close_matches(name, others, n=1)
    if elsewhere and not get_close_matches(name, hints_of(section), n=1):
        return f"{key}: unknown key ({origin}); did you mean {' or '.join(repr(key) for key in elsewhere[:3])}?"
    return f"{key}: unknown key ({origin}); {_nearest_sibling(parent, name, section)}"


def _nearest_sibling(parent: str, name: str, section: type[Any]) -> str:
    """Suggest like `nearest`, but compare only last names: a common section makes any two keys look alike."""
    prefix = f"{parent}." if parent else ""
    close = get_close_matches(name, hints_of(section), n=1)
    hint = f"did you mean '{prefix}{close[0]}'? " if close else ""
    return f"{hint}choose from: {', '.join(sorted(prefix + other for other in hints_of(section)))}"


def _every_key(section: type[Any], prefix: str = "") -> tuple[str, ...]:
    keys: list[str] = []
    for name, hint in hints_of(section).items():
        key = f"{prefix}.{name}" if prefix else name
        below = section_of(hint)
        keys += _every_key(below, key) if below else [key]
    return tuple(keys)


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)
