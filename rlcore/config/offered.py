"""Contributions of plugins to the configuration: types of their sections, and defaults of the main configuration."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlcore.config.checks import has_effect, walk
from rlcore.config.layers import Layer, from_mapping, leaves
from rlcore.config.schema import cached_by_type, hints_of, section_of
from rlcore.config.sections import RunConfig
from rlcore.errors import CALLED, ConfigError, PluginError, boundary, describe

if TYPE_CHECKING:
    from rlcore.config.providers import ConfigSection, Offer

_TAKEN = "scalars, enums, Literal, X | None, tuples of scalars, dict[str, <scalar, Any or frozen dataclass>]"


def plugin_sections(sections: "Sequence[Offer[ConfigSection]]") -> dict[str, type[Any]]:
    """The dataclass of each plugin's section, without the core's sections, which are at the top level.

    PluginError naming a plugin whose section cannot be merged and checked.
    """
    types: dict[str, type[Any]] = {}
    for offer in _of_plugins(sections):
        section = offer.value
        if section.name in types:
            raise PluginError(f"{offer.provider}: section 'plugins.{section.name}' is declared twice; needs one")
        _check_type(section.type, str(offer.provider))
        types[section.name] = section.type
    return types


def _of_plugins(sections: "Sequence[Offer[ConfigSection]]") -> "list[Offer[ConfigSection]]":
    """The sections of plugins; a plugin may have the name of one of the core's sections."""
    core = hints_of(RunConfig)
    return [offer for offer in sections if core.get(offer.value.name) is not offer.value.type]


def plugin_layers(sections: "Sequence[Offer[ConfigSection]]", user: Sequence[Layer]) -> list[Layer]:
    """The defaults of plugins as layers, in the order of the plugins' names.

    PluginError if two plugins set one key differently and no layer of the user sets it.
    """
    chosen = {key for layer in user for key, _ in leaves(layer.values)}
    set_by: dict[str, tuple[Any, str]] = {}
    layers = []
    for offer in sorted(sections, key=lambda section: (section.provider.plugin, section.value.name)):
        if not offer.value.defaults:
            continue
        defaults = from_mapping(offer.value.defaults).values
        for key, value in leaves(defaults):
            if key.partition(".")[0] == "plugins":
                raise PluginError(f"{offer.provider}: default '{key}' is a plugin's setting; needs a key of the core")
            before, who = set_by.setdefault(key, (value, str(offer.provider)))
            if before is not value and before != value and key not in chosen:
                raise PluginError(
                    f"{who} and {offer.provider}: both set '{key}', to {before!r} and {value!r}; choose one: {key}=..."
                )
        layers.append(Layer(f"plugin '{offer.provider.plugin}'", defaults, explicit=False))
    return layers


@cached_by_type
def _check_type(section: type[Any], who: str) -> None:
    whose = f"{who}: section type {section.__qualname__}"
    with boundary(whose, PluginError, CALLED):  # calls default factories
        try:
            OmegaConf.structured(section)
            _check_hints(section, who)
        except (OmegaConfBaseException, NameError) as cause:
            raise PluginError(f"{whose}: {describe(cause)}; needs {_TAKEN}") from cause


def check_made(merged: DictConfig, sections: "Sequence[Offer[ConfigSection]]") -> None:
    """ConfigError naming a plugin whose code refuses the merged values of its settings."""
    for offer in _of_plugins(sections):
        key = f"plugins.{offer.value.name}"
        if offer.value.name not in merged.plugins:
            continue
        # Resolving the whole configuration reports an interpolation that does not resolve.
        with boundary(f"{key} of {offer.provider}", ConfigError, CALLED), suppress(OmegaConfBaseException):
            OmegaConf.to_object(merged.plugins[offer.value.name])


def check_conditions(config: RunConfig, sections: "Sequence[Offer[ConfigSection]]") -> None:
    """PluginError naming a plugin that has a setting with an invalid `used_when`."""
    for offer in _of_plugins(sections):
        key = f"plugins.{offer.value.name}"
        for node in walk(config.plugins[offer.value.name], key) if offer.value.name in config.plugins else ():
            with boundary(f"{offer.provider}: {node.key}: its used_when", PluginError, CALLED):
                has_effect(config, node)


def _check_hints(section: type[Any], who: str) -> None:
    for name, hint in hints_of(section).items():
        if get_origin(hint) in (tuple, list) and any(section_of(argument) for argument in get_args(hint)):
            raise PluginError(
                f"{who}: section type {section.__qualname__}: '{name}' is a list of dataclasses, whose keys would "
                f"not be checked; needs dict[str, {get_args(hint)[0].__qualname__}]"
            )
        if refused := next((kind for kind in _kinds(hint) if issubclass(kind, bytes | PurePath)), None):
            raise PluginError(
                f"{who}: section type {section.__qualname__}: '{name}' is {refused.__name__}, which config.yaml and "
                f"plan.json cannot hold; needs str, or another of {_TAKEN}"
            )
        below = section_of(hint)
        if below is not None:
            _check_hints(below, who)


def _kinds(hint: Any) -> Iterator[type[Any]]:
    """The types in a type hint."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for argument in get_args(hint):
        yield from _kinds(argument)


def without_paths(values: Mapping[str, Any], types: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The values without `plugins.NAME.path` of plain-file plugins, which is not a setting of their sections."""
    plugins = {
        name: {key: value for key, value in section.items() if key != "path" or "path" in hints_of(types[name])}
        if name in types
        else section
        for name, section in (values.get("plugins") or {}).items()
    }
    return {**values, "plugins": plugins} if plugins else dict(values)
