"""Merges files and overrides into one frozen `RunConfig`.

Each layer takes precedence over those before it: the dataclasses' defaults, the preset (`algo.preset`), defaults of
plugins by plugin name, files in the given order, overrides in the given order. Mappings are merged, lists replaced.
Only files and overrides are *explicit* settings, and only an explicit setting without effect is an error. It is not if
a later file or an override sets what gives it an effect: `train.stop.metric=` switches off what a file, such as that of
a run which is resumed, says of `train.stop`.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_origin

from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from rlcore.config.checks import check_bounds, check_effects, check_rules, values_with_effect
from rlcore.config.choices import AUTO, DEVICE, Choice, Chooser, no_choices
from rlcore.config.emptied import emptied
from rlcore.config.file_paths import paths_from_their_files, with_absolute_paths
from rlcore.config.layers import (
    Layer,
    Source,
    check_moved,
    from_mapping,
    join_layers,
    leaves,
    nest,
    overlay,
    read_layers,
)
from rlcore.config.names import check_name
from rlcore.config.offered import check_conditions, check_made, plugin_layers, plugin_sections, without_paths
from rlcore.config.peer_names import renamed_value
from rlcore.config.plain_values import NotPlain, lay_plain, make_plain, merge_plain
from rlcore.config.presets import PRESETS
from rlcore.config.schema import choices_of, fit, hint_at, wanted
from rlcore.config.sections import RunConfig
from rlcore.errors import ConfigError, PluginError, nearest
from rlcore.errors.redaction import redact, remember_environment, remember_variable
from rlcore.types import FrozenDict

if TYPE_CHECKING:
    from rlcore.config.providers import ConfigSection, Offer


LORA_LR = 1e-5
"""The default of a LoRA actor: its few new weights take ten times the learning rate."""


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved configuration with the origins of its values."""

    config: RunConfig
    origins: Mapping[str, str]
    """The origin of each dotted key: 'default', 'preset grpo', 'plugin 'x'', the file's path, 'override 'a.b=1''."""
    values: Mapping[str, Any] = field(default_factory=FrozenDict)
    """The value of every dotted key for display: interpolations are unresolved."""
    files: tuple[Path, ...] = ()
    """The files that were read, lowest first."""
    merged: Mapping[str, Any] = field(default_factory=FrozenDict, repr=False)
    """All sections, unresolved."""
    choices: tuple[Choice, ...] = ()
    """The keys whose defaults depend on the machine, with their values."""

    @cached_property
    def saved(self) -> Mapping[str, Any]:
        """The configuration that is saved with the run: every value with an effect, absolute paths,
        `${oc.env:NAME}` unresolved."""
        return with_absolute_paths(values_with_effect(self.merged, self.config), self.origins)

    @cached_property
    def yaml(self) -> str:
        """`saved` as text.

        Loading it again, with the same plugins, gives the same configuration except values without effect.
        """
        return str(OmegaConf.to_yaml(OmegaConf.create(dict(self.saved))))


def enabled_plugins(
    files: Sequence[Source], overrides: Sequence[str], moved: Mapping[str, str] = FrozenDict()
) -> dict[str, Mapping[str, Any]]:
    """The raw `plugins.*` sections of files and overrides by plugin, before any plugin is loaded.

    ConfigError for a file or override that cannot be read, for an invalid name of a plugin, and for a key in `moved`.
    `moved` maps old names of keys and sections to new ones.
    """
    sections: dict[str, Mapping[str, Any]] = {}
    for layer in read_layers(files, overrides):
        check_moved(layer, moved)
        plugins = layer.values.get("plugins")
        if not isinstance(plugins, (Mapping, type(None))):
            raise ConfigError(f"plugins: found {plugins!r} ({layer.origin}); needs a section, such as plugins.x={{}}")
        for name, section in (plugins or {}).items():
            check_name("plugins", name, "a plugin")
            if not isinstance(section, (Mapping, type(None))):
                raise ConfigError(f"plugins.{name}: found {section!r} ({layer.origin}); needs a section, such as {{}}")
            sections[name] = overlay(sections.get(name, {}), section or {})
    return sections


def load_config(
    files: Sequence[Source],
    overrides: Sequence[str],
    sections: "Sequence[Offer[ConfigSection]]",
    choose: Chooser = no_choices,
) -> LoadedConfig:
    """The merged, typed and checked configuration; `sections` are those of the enabled plugins, and of the core.

    A section of `config.plugins` is an instance of its plugin's dataclass, or the raw mapping of a plugin without one.
    `choose` gives the defaults that depend on the machine, which are below all layers, and the device that
    `cluster.device=auto` stands for. ConfigError for anything the user can fix, PluginError for an invalid section or
    default.
    """
    types = plugin_sections(sections)
    user = read_layers(files, overrides)
    below = plugin_layers(sections, user)
    layers = emptied([_preset([*below, *user]), *below, *user], types)
    fitted = [_fit(layer, types) for layer in layers]
    loaded = _Merge(fitted, types)
    if loaded.tree is not None:
        check_made(loaded.tree, sections)
    config = loaded.resolve()
    if found := paths_from_their_files(config, loaded.shown, loaded.origins):
        for key, path in found.items():
            loaded.put({key: path}, loaded.origins[key])
        config = loaded.resolve()
    if config.actor.lora.enabled and loaded.origins["actor.lr"] == "default":
        loaded.put({"actor.lr": LORA_LR}, "default with actor.lora")
        config = loaded.resolve()
    choices = tuple(choose(config, loaded.origins))
    chosen = {choice.key: choice.value for choice in choices if not choice.set_by and choice.key != DEVICE}
    if config.cluster.device == AUTO:
        device = next(choice.value for choice in choices if choice.key == DEVICE)
        loaded.put({DEVICE: device}, loaded.origins[DEVICE])
    if chosen or config.cluster.device == AUTO:
        loaded.put(chosen, CHOSEN)
        config = loaded.resolve()
    check_conditions(config, sections)
    check_bounds(config, loaded.describe)
    check_effects(config, loaded.explicit(), loaded.describe)
    check_rules(config)
    paths = tuple(file for file in files if isinstance(file, Path))
    return LoadedConfig(config, FrozenDict(loaded.origins), FrozenDict(loaded.shown), paths, loaded.raw, choices)


CHOSEN = "default of the machine"
"""The origin of a value that was chosen for the machine."""


def _plain(merged: DictConfig) -> Any:
    return OmegaConf.to_container(merged, resolve=False, enum_to_str=True)


def check_section(section: "Offer[ConfigSection]") -> None:
    """PluginError or ConfigError unless the section and the defaults of its plugin can be merged by themselves."""
    types = plugin_sections([section])
    _merge([_fit(layer, types) for layer in plugin_layers([section], ())], types)


class _Merge:
    """The merged values, unresolved, with their origins."""

    tree: DictConfig | None = None
    """The same values as an OmegaConf object; None if all are plain."""

    def __init__(self, layers: Sequence[Layer], types: Mapping[str, type[Any]]) -> None:
        self._layers, self._types = layers, types
        try:
            raw = merge_plain([without_paths(layer.values, types) for layer in layers], types)
        except NotPlain:
            self.tree = _merge(layers, types)
            raw = _plain(self.tree)
        self.raw = _with_paths(raw, layers)
        self.shown = dict(leaves(self.raw))
        set_by = [(layer.origin, dict(leaves(layer.values))) for layer in layers]
        every_key = {key for _, values in set_by for key in values}
        self.origins = {key: _origin(key, set_by, every_key) for key in self.shown}

    def put(self, values: Mapping[str, Any], origin: str) -> None:
        """Set keys that no layer sets, to values of their types; ten times as fast as another merge."""
        for key, value in values.items():
            *above, name = key.split(".")
            raw: Any = self.raw
            section: Any = self.tree
            for part in above:
                raw, section = raw[part], None if section is None else section[part]
            if section is None:
                lay_plain(self.raw, nest(key, value), self._types)
            else:
                with read_write(section):
                    section[name] = value
                raw[name] = _plain(section)[name]
            self.shown[key] = raw[name]
            self.origins[key] = origin

    def describe(self, key: str) -> str:
        """The value as written, and its origin."""
        return redact(f"{self.shown.get(key)!r} ({self.origins.get(key, 'default')})")

    def explicit(self) -> dict[str, int]:
        """Keys that the user set, and the keys of the sections above them, with the number of the highest layer that
        sets them. All overrides have one number: they are typed together."""
        found: dict[str, int] = {}
        for number, layer in enumerate(self._layers):
            for key, _ in leaves(layer.values) if layer.explicit else ():
                parts = key.split(".")
                level = len(self._layers) if layer.key else number
                found |= {".".join(parts[:depth]): level for depth in range(1, len(parts) + 1)}
        return found

    def resolve(self) -> RunConfig:
        """The configuration with every interpolation resolved; ConfigError naming a key that cannot be resolved."""
        remember_environment()
        if self.tree is None:
            return make_plain(self.raw, self._types)
        for key, value in self.shown.items():
            if value == "???":
                hint = hint_at(key, RunConfig, self._types)
                raise ConfigError(f"{key}: required, and set nowhere; needs {wanted(hint)}, such as {key}=...")
            for name in _variables(value):
                remember_variable(name)
        try:
            config: RunConfig = OmegaConf.to_object(self.tree)  # type: ignore[assignment]
        except (OmegaConfBaseException, RecursionError) as cause:
            raise ConfigError(self._unresolved(cause)) from cause
        return config

    def _unresolved(self, cause: BaseException) -> str:
        if not getattr(cause, "full_key", None) and self.tree is not None and (key := self._no_list(self.tree)):
            remedy = f"needs {wanted(hint_at(key, RunConfig, self._types))}: put it in brackets and quotes"
            return f"{key}: found {self.describe(key)}, which does not resolve to a list; {remedy}"
        key = str(getattr(cause, "full_key", None) or "configuration")
        reason = redact(str(cause).partition("\n")[0])
        return f"{key}: found {self.describe(key)}, which does not resolve: {reason}"

    def _no_list(self, tree: DictConfig) -> str:
        """The first key of a list whose interpolation is another value, which OmegaConf does not name; '' if none."""
        for key, value in self.shown.items():
            if isinstance(value, str) and get_origin(hint_at(key, RunConfig, self._types)) is tuple:
                try:
                    found = OmegaConf.select(tree, key)
                except OmegaConfBaseException:
                    return key
                if not OmegaConf.is_list(found):
                    return key
        return ""


def _origin(key: str, set_by: list[tuple[str, dict[str, Any]]], every_key: set[str]) -> str:
    """The highest layer that sets the key or something above it; `every_key` has the keys of all layers."""
    parts = key.split(".")
    above = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if every_key.isdisjoint((key, *above)):
        return "default"
    for origin, values in set_by[::-1]:
        if key in values or any(values.get(parent) for parent in above):
            return origin
    return "default"


def _variables(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    found = []
    for text in texts:
        if isinstance(text, str):
            found += [word.partition("}")[0] for word in text.split("${oc.env:")[1:]]
        elif isinstance(text, Mapping):
            found += [name for _, child in leaves(text) for name in _variables(child)]
    return found


def _preset(layers: Sequence[Layer]) -> Layer:
    """The layer of the preset that the highest of `layers` names."""
    name: Any = RunConfig().algo.preset
    origin = "default"
    for layer in layers:
        algo = layer.values.get("algo")
        if isinstance(algo, Mapping) and "preset" in algo:
            name, origin = algo["preset"], layer.origin
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"algo.preset: found {name!r} ({origin}); {nearest(str(name), tuple(PRESETS))}")
    defaults = from_mapping({f"algo.{key}": value for key, value in PRESETS[name].items()})
    return Layer(f"preset {name}", defaults.values, explicit=False)


def _fit(layer: Layer, types: Mapping[str, type[Any]]) -> Layer:
    """The layer with valid keys and sections."""
    try:
        values = fit({key: value for key, value in layer.values.items() if key != "plugins"}, RunConfig, "", layer)
        plugins: dict[str, Any] = {}
        for name, section in (layer.values.get("plugins") or {}).items():
            plugins[name] = _fit_plugin(name, section or {}, types.get(name), layer)
    except ConfigError as cause:
        if layer.explicit:
            raise
        raise PluginError(f"{layer.origin}: one of its defaults is wrong: {cause}") from cause
    return replace(layer, values={**values, "plugins": plugins} if plugins else values)


def _fit_plugin(name: str, section: Mapping[str, Any], type_: type[Any] | None, layer: Layer) -> dict[str, Any]:
    if type_ is None:
        settings = [key for key in section if key != "path"]
        if settings:
            raise ConfigError(
                f"plugins.{name}.{settings[0]}: unknown key ({layer.origin}); plugin '{name}' declares no settings"
            )
        return dict(section)
    path = {} if "path" in type_.__dataclass_fields__ else {key: section[key] for key in section if key == "path"}
    rest = {key: value for key, value in section.items() if key not in path}
    return {**fit(rest, type_, f"plugins.{name}", layer), **path}


@lru_cache(maxsize=64)
def _schema(plugins: tuple[tuple[str, type[Any]], ...]) -> Callable[[], DictConfig]:
    """A function that copies the sections of core and plugins with their defaults.

    It loads a pickle, which is ten times as fast as a deep copy.
    """
    sections = {"plugins": {name: OmegaConf.structured(kind) for name, kind in plugins}}
    schema = cast(DictConfig, OmegaConf.unsafe_merge(OmegaConf.structured(RunConfig), sections))
    try:
        return partial(pickle.loads, pickle.dumps(schema))
    except (pickle.PicklingError, AttributeError):  # a plugin's class that cannot be imported by its name
        return partial(deepcopy, schema)


def _defaults(types: Mapping[str, type[Any]]) -> DictConfig:
    """The sections of the core and of plugins, as a copy that the caller may change."""
    return _schema(tuple(types.items()))()


UNFIT = (OmegaConfBaseException, TypeError)
"""Errors of OmegaConf for a value of the wrong type; TypeError for a section in the place of a list."""


def _merge(layers: Sequence[Layer], types: Mapping[str, type[Any]]) -> DictConfig:
    """All layers over the dataclasses' defaults; ConfigError naming the value of the wrong type."""
    try:
        merged = OmegaConf.unsafe_merge(
            _defaults(types), *join_layers(without_paths(layer.values, types) for layer in layers)
        )
    except UNFIT as cause:
        raise _wrong_type(layers, types, cause) from cause
    if not isinstance(merged, DictConfig):
        raise TypeError("merging mappings gives a mapping")
    return merged


def _wrong_type(layers: Sequence[Layer], types: Mapping[str, type[Any]], cause: Exception) -> ConfigError | PluginError:
    """The error for the refused value. OmegaConf does not always say which it is, so each value is tried alone."""
    for layer in layers:
        for key, value in leaves(without_paths(layer.values, types)):
            try:
                OmegaConf.unsafe_merge(_defaults(types), nest(key, value))
            except UNFIT:
                hint = hint_at(key, RunConfig, types)
                choices = choices_of(hint)
                needs = renamed_value(key, value, choices)
                needs = needs or (nearest(str(value), choices) if choices else f"needs {wanted(hint)}")
                error = ConfigError if layer.explicit else PluginError
                return error(f"{key}: found {'null' if value is None else repr(value)} ({layer.origin}); {needs}")
    return ConfigError(f"configuration: {str(cause).partition(chr(10))[0]}")


def _with_paths(raw: Any, layers: Sequence[Layer]) -> dict[str, Any]:
    """The merged values with the paths of plain-file plugins, so that the saved configuration is complete."""
    for layer in layers:
        for name, section in (layer.values.get("plugins") or {}).items():
            if "path" in section:
                raw["plugins"][name]["path"] = section["path"]
    return dict(raw)
