"""Reads the layers of the configuration (files, overrides, mappings) as untyped data, and checks that they are safe."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlcore.errors import ConfigError, describe
from rlcore.types import plain

Source = Path | Mapping[str, Any]
"""A configuration file, or its content as a mapping (keys may be dotted)."""

_INTERPOLATION = re.compile(r"(?<!\\)\$\{([^{}]*)\}?")
_ALLOWED = re.compile(r"oc\.env:[A-Za-z_][A-Za-z0-9_]*|[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_SECRET_KEY = re.compile(r"(^|_)(api_?key|passwd|password|secret|credentials?|(access|auth|api)_token)$|^token$", re.I)
MAX_DEPTH = 32
"""Limit of nested lists and sections; deeper values can only be an attack or an accident."""
NULLS = ("null", "Null", "NULL", "~")
"""Plain texts that YAML reads as an empty value."""
OPENING, CLOSING, INDICATORS = ("{", "["), ("}", "]"), ("@", "`", "*", "&", "%")
"""Characters of YAML: what opens and closes lists and mappings within a line, and what no plain text begins with."""
_OVERRIDE_KEY = re.compile(r"[^\s.=\[\]]+(\.[^\s.=\[\]]+)*")


@dataclass(frozen=True)
class Layer:
    """One source of values."""

    origin: str
    """The origin in words: 'preset grpo', 'plugin 'x'', a file's path, 'override 'a.b=1''."""
    values: Mapping[str, Any]
    """Nested plain values with text keys; interpolations unresolved."""
    explicit: bool = True
    """Set by the user, not by a preset or plugin."""
    key: str = ""
    """The dotted key of an override."""
    text: str = ""
    """The value of an override as typed."""


def read_layers(sources: Sequence[Source], overrides: Sequence[str]) -> list[Layer]:
    """The user's layers, lowest first; ConfigError for files that cannot be read and values that are never allowed."""
    layers = _every_layer(sources, overrides)
    for layer in layers:
        _check_depth(layer.values, layer.origin)
        check_safe(layer.values, "", layer.origin)
        check_safe(layer.text, layer.key, layer.origin)  # keys of type text take the text as typed
    return _without_left_out(layers)


def plugins_left_out(sources: Sequence[Source], overrides: Sequence[str]) -> set[str]:
    """The plugins of which the highest layer that names them says `plugins.NAME=false`."""
    highest = {name: section for layer in _every_layer(sources, overrides) for name, section in _plugins(layer).items()}
    return {name for name, section in highest.items() if section is False}


def _every_layer(sources: Sequence[Source], overrides: Sequence[str]) -> list[Layer]:
    layers = [read_file(source) if isinstance(source, Path) else from_mapping(source) for source in sources]
    return layers + [read_override(override) for override in overrides]


def _without_left_out(layers: Sequence[Layer]) -> list[Layer]:
    """The layers without the sections of plugins that `plugins.NAME=false` in a higher layer leaves out."""
    kept: list[Layer] = []
    for layer in layers:
        left_out = [name for name, section in _plugins(layer).items() if section is False]
        for name in left_out:
            if not any(name in _plugins(below) for below in kept):
                raise ConfigError(
                    f"plugins.{name}: found False ({layer.origin}), but nothing before it enables that plugin"
                )
        kept = [_without_plugins(below, left_out) for below in [*kept, layer]] if left_out else [*kept, layer]
    return kept


def _without_plugins(layer: Layer, names: Sequence[str]) -> Layer:
    if not (plugins := _plugins(layer)):
        return layer
    left = {name: section for name, section in plugins.items() if name not in names}
    return replace(layer, values={**layer.values, "plugins": left})


def _plugins(layer: Layer) -> Mapping[str, Any]:
    """The sections of plugins that the layer has; none if `plugins` is something else, which is refused later."""
    plugins = layer.values.get("plugins")
    return plugins if isinstance(plugins, Mapping) else {}


def read_file(path: Path) -> Layer:
    """A YAML file as a layer."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError as cause:
        raise ConfigError(f"{path}: no such configuration file (an override is written key=value)") from cause
    except IsADirectoryError as cause:
        files = sorted(str(file) for ending in ("yaml", "yml") for file in path.glob(f"*.{ending}"))
        found = f"choose from: {', '.join(files)}" if files else "it holds none (*.yaml)"
        hint = "; `rlcore resume` and `rlcore eval` take a run" if (path / "plan.json").is_file() else ""
        raise ConfigError(f"{path}: is a directory; needs a configuration file: {found}{hint}") from cause
    except yaml.MarkedYAMLError as cause:
        problem = _not_yaml(cause, path.read_text("utf-8", "replace"))
        raise ConfigError(f"{path}: {problem}") from cause
    except OmegaConfBaseException as cause:
        problem = _null_key(path) or f"{describe(cause)}; keys must be text (quote them) and interpolations ${{a.b}}"
        raise ConfigError(f"{path}: {problem}") from cause
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as cause:  # RecursionError: deep nesting
        raise ConfigError(f"{path}: cannot be read as a configuration: {describe(cause)}") from cause
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a list; needs a mapping of sections at its top")
    return Layer(str(path), {str(key): value for key, value in content.items()})


def _null_key(path: Path) -> str:
    """The place of the first key that YAML reads as null, and the remedy; '' if there is none."""
    for before, token in pairwise(yaml.scan(path.read_text("utf-8"))):
        is_key = isinstance(before, yaml.KeyToken)
        if is_key and isinstance(token, yaml.ScalarToken) and token.plain and token.value in NULLS:
            found = f"line {token.start_mark.line + 1}: YAML reads the key {token.value} as an empty value"
            return f'{found}; keys must be text: quote it, "{token.value}"'
    return ""


def _not_yaml(cause: yaml.MarkedYAMLError, text: str) -> str:
    """The place and the text that YAML cannot read, and the remedy if it is known."""
    in_quotes = "quoted scalar" in (cause.context or "")
    is_open = in_quotes and (cause.problem or "").startswith("found unexpected")  # end, or beginning of a document
    mark = cause.context_mark if is_open else cause.problem_mark
    if mark is None:
        return f"not valid YAML: {cause.problem}"
    if "single document" in (cause.context or ""):
        return f"a second document begins in line {mark.line + 1}, with '---'; needs one; divide it into two files"
    lines = [*text.splitlines(), ""]
    line = lines[min(mark.line, len(lines) - 1)]
    problem = cause.problem or "it cannot be read"
    if is_open:
        problem = f"the quote {line[mark.column : mark.column + 1]} is not closed, in {line!r}"
    elif in_quotes:
        problem += (
            f", in {line.strip()}; a backslash in double quotes begins an escape: use single quotes, or write \\\\"
        )
    elif "\t" in line[: mark.column + 1]:
        problem = "found a tab; indent with spaces"
    elif problem.startswith("found duplicate key"):
        problem += "; a section has each of its keys once"
    else:
        above = f", below {lines[mark.line - 1]!r}" if mark.line and line else ""
        problem += (f", in {line!r}{above}" if line else "") + _remedy(cause, lines, line, mark.column)
    return f"not valid YAML in line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _remedy(cause: yaml.MarkedYAMLError, lines: Sequence[str], line: str, column: int) -> str:
    """The remedy for an error at this column; '' if it is not known."""
    context, opened, found = cause.context or "", cause.context_mark, line[column : column + 1]
    begin = lines[opened.line][opened.column : opened.column + 1] if opened and opened.line < len(lines) else ""
    if opened and "flow" in context and begin in OPENING:
        place = f"{begin!r} of line {opened.line + 1}, column {opened.column + 1}"
        return f"; the {place}, is open there: separate its entries by one comma each, and close it"
    if "flow" in context:
        return "; entries of {...} and [...] are separated by one comma each"
    if found in CLOSING:
        return f"; the {found!r} closes nothing: leave it out, or open it"
    if found in INDICATORS:
        return f"; put a text that begins with {found!r} in quotes"
    if found == ":" and ": " in line[:column]:
        return "; put a text with ': ' in it in quotes"
    if found and line[:column].rstrip()[-1:] in ("'", '"'):
        return "; the quote before it ends the text: write '' for a ' in single quotes, or use the other quotes"
    return "; keys of one section begin in the same column" if found else ""


def from_mapping(values: Mapping[str, Any]) -> Layer:
    """A mapping from Python as a layer; 'a.b' is short for {'a': {'b': ...}}."""
    _check_depth(values, "Python")
    nested: dict[str, Any] = {}
    for key, value in values.items():
        nested = overlay(nested, nest(str(key), plain(value, _setting)))
    return Layer("Python", nested)


def read_override(override: str) -> Layer:
    """'a.b=1' as a layer; the value is YAML: 1, true, null, [a, b], {}, "text"; a further '=' belongs to the value.

    A value that is not YAML and does not begin like a quoted text, list or mapping is text.
    """
    origin = f"override '{' '.join(override.split())}'"  # errors are one line
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _OVERRIDE_KEY.fullmatch(key):
        raise ConfigError(f"{origin}: needs the form key=value with a dotted key, such as actor.lr=1e-5")
    value: Any = text.strip()
    try:
        value = deepcopy(_parsed(text))
    except OmegaConfBaseException as cause:
        raise ConfigError(f"{origin}: {describe(cause)}; interpolations are written ${{a.b}}") from cause
    except (yaml.YAMLError, RecursionError, UnicodeError) as cause:
        if not isinstance(cause, yaml.YAMLError) or value[:1] in "\"'[{":
            marked = cause if isinstance(cause, yaml.MarkedYAMLError) else None
            problem = _not_yaml(marked, text) if marked else f"not valid YAML: {describe(cause)}"
            raise ConfigError(f"{origin}: its value is {problem}") from cause
    return Layer(origin, nest(key, value), key=key, text=text.strip())


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """The YAML value of an override; cached, because it is read twice: for enabled plugins and for its value."""
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    return parsed["value"]


def nest(key: str, value: Any) -> dict[str, Any]:
    """{'a': {'b': value}} for 'a.b'."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def overlay(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` laid over `low`: mappings are merged, everything else is replaced."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = overlay(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def join_layers(layers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Join neighbouring layers that set different keys, because merging takes a millisecond per layer."""
    joined: list[Mapping[str, Any]] = []
    set_keys: set[str] = set()
    sections: set[str] = set()
    for values in layers:
        keys = {key for key, _ in leaves(values)}
        around = {key[:end] for key in keys for end, letter in enumerate(key) if letter == "."}
        if joined and not keys & (set_keys | sections) and not around & set_keys:
            joined[-1] = overlay(joined[-1], values)
        else:
            joined.append(values)
            set_keys, sections = set(), set()
        set_keys |= keys
        sections |= around
    return joined


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything but mappings that are not empty."""
    for name, value in values.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, key)
        else:
            yield key, value


def check_moved(layer: Layer, moved: Mapping[str, str]) -> None:
    """ConfigError with the new name of the layer's first key that has moved, by itself or with its section."""
    for key, _ in leaves(layer.values):
        for old, new in moved.items():
            if f"{key}.".startswith(f"{old}."):
                raise ConfigError(f"{key}: now {new}{key.removeprefix(old)} ({layer.origin})")


def _check_depth(values: Mapping[str, Any], origin: str) -> None:
    """ConfigError for values that are nested too deeply for a recursive reader; this function is iterative."""
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        sections = [child for value in level if isinstance(value, Mapping) for child in value.values()]
        level = sections + [child for value in level if isinstance(value, (list, tuple)) for child in value]
        if not level:
            return
    raise ConfigError(f"{origin}: its values are nested more than {MAX_DEPTH} levels deep; needs fewer")


def check_safe(value: Any, key: str, origin: str) -> None:
    """ConfigError for content that no configuration may have, at any depth.

    That is an interpolation other than `${a.b}` and `${oc.env:NAME}`, the key `_target_`, a key that is not text,
    bytes, or a literal secret. A literal secret would be saved with the run.
    """
    if isinstance(value, Mapping):
        for name, child in value.items():
            below = f"{key}.{name}" if key else str(name)
            _check_key(name, child, below, origin)
            check_safe(child, below, origin)
    elif isinstance(value, (list, tuple)):
        for child in value:
            check_safe(child, key, origin)
    elif isinstance(value, bytes):
        raise ConfigError(f"{key}: found bytes ({origin}), which plan.json cannot hold; needs text")
    elif isinstance(value, str):
        _check_interpolations(value, key, origin)


def _check_key(name: object, value: Any, key: str, origin: str) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{key}: found the key {name!r} ({origin}); needs text: put it in quotes")
    if name == "_target_":
        raise ConfigError(f"{key}: refused ({origin}): a configuration builds no objects; name code as module:attr")
    if isinstance(value, str) and value and _SECRET_KEY.search(name) and "${oc.env:" not in value:
        raise ConfigError(
            f"{key}: found a secret written out, which would be saved with the run; needs ${{oc.env:NAME}}, which is "
            f"saved as it is"
        )


def _check_interpolations(text: str, key: str, origin: str) -> None:
    for match in _INTERPOLATION.finditer(text):
        if not (match.group(0).endswith("}") and _ALLOWED.fullmatch(match.group(1))):
            raise ConfigError(
                f"{key}: refused interpolation {match.group(0)!r} ({origin}); choose from: ${{a.b}} for another value, "
                f"${{oc.env:NAME}} for an environment variable"
            )


def _setting(value: Any) -> Any:
    """A default in the form for OmegaConf: enums by name, paths as text."""
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value
