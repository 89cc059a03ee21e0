"""Merges and builds configurations whose values have exactly the types of their keys, without OmegaConf.

OmegaConf takes ten times as long, but defines the result. A value that it would convert, resolve or refuse raises
`NotPlain` here; so does a section whose class runs code when it is created. Plain values give the same result both
ways.
"""

import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import OmegaConf

from rlcore.config.schema import cached_by_type, entries_of, hints_of, section_of
from rlcore.config.sections import RunConfig
from rlcore.types import plain

SCALARS = (str, int, float, bool, NoneType)
EXACT_FLOAT = 2**53
"""Whole numbers up to this one convert to floats without rounding."""

Sections = Mapping[str, type[Any]]
"""Section types of plugins, by plugin."""


class NotPlain(Exception):
    """A value or a type that is left to OmegaConf."""


@dataclass(frozen=True)
class _Kind:
    """Merges and builds the values of one type."""

    lay: Callable[[Any, Any], Any]
    """(value below, value above) -> merged value; dicts below are changed in place. NotPlain for other types."""
    make: Callable[[Any], Any]
    """(merged value) -> value of the typed configuration."""
    fresh: Callable[[], Any]
    """A copy of the defaults, which the caller may change."""


def merge_plain(layers: "list[Mapping[str, Any]]", plugins: Sections) -> dict[str, Any]:
    """The layers, lowest first, over the defaults of the sections; NotPlain if a text may be an interpolation."""
    raw: dict[str, Any] = _section(RunConfig).fresh()
    raw["plugins"] = {name: _section(kind).fresh() for name, kind in plugins.items()}
    for layer in layers:
        lay_plain(raw, layer, plugins)
    _check_texts(raw)
    return raw


def lay_plain(raw: dict[str, Any], values: Mapping[str, Any], plugins: Sections) -> None:
    """Merge nested values into merged ones, in place; the new values win."""
    _section(RunConfig).lay(raw, {key: value for key, value in values.items() if key != "plugins"})
    for name, section in values.get("plugins", {}).items():
        kind = _section(plugins[name]) if name in plugins else FREE
        raw["plugins"][name] = kind.lay(raw["plugins"].get(name, {}), section)


def make_plain(raw: Mapping[str, Any], plugins: Sections) -> RunConfig:
    """The typed configuration of merged values."""
    made = {
        name: (_section(plugins[name]) if name in plugins else FREE).make(raw["plugins"][name])
        for name in raw["plugins"]
    }
    config: RunConfig = _section(RunConfig).make({**raw, "plugins": made})
    return config


def _check_texts(value: Any) -> None:
    """NotPlain for a text that OmegaConf may read as an interpolation or as missing."""
    if isinstance(value, str):
        if "${" in value or "???" in value:
            raise NotPlain
    elif isinstance(value, dict):
        for inner in value.values():
            _check_texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_texts(inner)


@cached_by_type
def _section(kind: type[Any]) -> _Kind:
    """The functions for a section, compiled once per class; NotPlain for a class that OmegaConf has to build."""
    hints = hints_of(kind)
    _check_class(kind, tuple(hints))
    kinds = {name: _kind(hint) for name, hint in hints.items()}
    defaults = pickle.dumps(OmegaConf.to_container(OmegaConf.structured(kind), resolve=False, enum_to_str=True))

    def lay(below: dict[str, Any], above: Any) -> dict[str, Any]:
        for name, value in _mapping(above).items():
            if name not in kinds:
                raise NotPlain
            below[name] = kinds[name].lay(below[name], value)
        return below

    def make(values: Mapping[str, Any]) -> Any:
        return kind(**{name: inner.make(values[name]) for name, inner in kinds.items()})

    return _Kind(lay, make, lambda: pickle.loads(defaults))


def _check_class(kind: type[Any], names: tuple[str, ...]) -> None:
    """NotPlain unless creating an instance only sets its fields."""
    if (
        type(kind) is not type
        or not kind.__dataclass_params__.frozen
        or hasattr(kind, "__post_init__")
        or getattr(kind, "__new__", None) is not object.__new__
        or tuple(inspect.signature(kind).parameters) != names
        or len(fields(kind)) != len(kind.__dataclass_fields__)
    ):
        raise NotPlain


def _kind(hint: Any) -> _Kind:
    if hint is Any:
        return FREE
    section = section_of(hint)
    if section is not None and section is hint:
        return _section(section)
    if get_origin(hint) is dict and get_args(hint)[0] is str:
        return _entries(_kind(entries_of(hint)))
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return _list(_scalar(get_args(hint)[0]))
    exact = _scalar(hint)
    return _Kind(lambda below, above: exact(above), _same, lambda: None)


def _entries(inner: _Kind) -> _Kind:
    def lay(below: dict[str, Any], above: Any) -> dict[str, Any]:
        for name, value in _mapping(above).items():
            below[name] = inner.lay(below[name] if name in below else inner.fresh(), value)
        return below

    return _Kind(lay, lambda values: {name: inner.make(value) for name, value in values.items()}, dict)


def _list(exact: Callable[[Any], Any]) -> _Kind:
    def lay(below: Any, above: Any) -> tuple[Any, ...]:
        if type(above) not in (list, tuple):
            raise NotPlain
        return tuple(exact(value) for value in above)

    return _Kind(lay, _same, tuple)


def _scalar(hint: Any) -> Callable[[Any], Any]:
    """A function that returns a value of the type unchanged and raises NotPlain for any other."""
    if get_origin(hint) is Literal:
        return _one_of(get_args(hint))
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not set(members) <= set(SCALARS) or len(set(members) - {NoneType}) != 1:
        raise NotPlain
    return _float(members) if float in members else _exactly(members)


def _one_of(choices: tuple[Any, ...]) -> Callable[[Any], Any]:
    def exact(value: Any) -> Any:
        if type(value) is not str or value not in choices:
            raise NotPlain
        return value

    return exact


def _float(members: tuple[Any, ...]) -> Callable[[Any], Any]:
    others = _exactly(members)

    def exact(value: Any) -> Any:
        if type(value) is int and abs(value) <= EXACT_FLOAT:
            return float(value)
        return others(value)

    return exact


def _exactly(members: tuple[Any, ...]) -> Callable[[Any], Any]:
    def exact(value: Any) -> Any:
        if type(value) not in members:
            raise NotPlain
        return value

    return exact


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict or any(type(name) is not str for name in value):
        raise NotPlain
    return value


def _lay_free(below: Any, above: Any) -> Any:
    if type(below) is not type(above) and (
        type(below) in (dict, list) or (below is not None and type(above) in (dict, list))
    ):
        raise NotPlain  # OmegaConf refuses some of them
    if type(above) is dict:
        merged = {} if below is None else below
        for name, value in _mapping(above).items():
            merged[name] = _lay_free(merged.get(name), value)
        return merged
    if type(above) is list:
        return [_lay_free(None, value) for value in above]
    if type(above) not in SCALARS:
        raise NotPlain
    return above


def _same(value: Any) -> Any:
    return value


FREE = _Kind(_lay_free, plain, lambda: None)
"""Values of any type, in sections that plugins or tasks read."""
