"""Plugins: found by entry points, enabled by name or by a `plugins.NAME` section, checked before and after import.

A plugin that is installed but not enabled is never imported.
"""

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.config import LoadedConfig, RunConfig, enabled_plugins, load_config
from rlcore.config.choices import Choice, Chooser
from rlcore.config.file_paths import plugin_paths
from rlcore.config.layers import plugins_left_out
from rlcore.errors import ConfigError, PluginError
from rlcore.errors.redaction import remember_environment
from rlcore.plan import Facts
from rlcore.plan.catalog import moved_keys, rollout_on_gpus
from rlcore.plan.device_defaults import choose_defaults
from rlcore.plugins.discover import InstalledPlugin, canonical, installed
from rlcore.plugins.enabled import is_path, load_plugin, name_of
from rlcore.plugins.hook_calls import Hooks
from rlcore.report.foreign_output import foreign_output
from rlcore.runtime.machine import gather_facts, machine_facts

__all__ = ["Hooks", "InstalledPlugin", "configure", "installed", "load"]


def load(names_or_paths: Iterable[str]) -> Hooks:
    """The offers of the core and of the named plugins; a path ending in .py is a plugin in a plain file."""
    named: dict[str, str] = {}
    for plugin in names_or_paths:
        name, source = name_of(plugin), str(Path(plugin).absolute()) if is_path(plugin) else canonical(plugin)
        if named.setdefault(name, source) != source:
            raise PluginError(f"plugin '{name}' is enabled twice, as {named[name]} and as {source}; leave one out")
    return Hooks([load_plugin(named[name]) for name in sorted(named)])


@foreign_output()
def configure(
    files: Sequence[Path | Mapping[str, Any]],
    overrides: Sequence[str],
    plugins: Sequence[str] = (),
    machine: Facts | None = None,
    *,
    elsewhere: bool = False,
) -> tuple[Hooks, LoadedConfig]:
    """The offers and the configuration of a run.

    `plugins` are the names or paths of --plugin. Each stands for an override `plugins.NAME={}`, or for a file
    `plugins.STEM.path=/abs/file.py`, so the saved configuration enables it again. Defaults follow `machine`, or this
    machine if it is None. If the defaults choose a rollout backend, its plugin is enabled; they choose none whose
    plugin is left out. With `elsewhere` the run is for a machine with other libraries: a backend then needs its plugin
    here, but not its library.
    """
    remember_environment()  # before a plugin prints
    for_gpus = _offered_for_gpus() if elsewhere else _installed_for_gpus()
    left_out = plugins_left_out(files, overrides) if for_gpus else set()
    on_gpus = {backend: plugin for plugin, backend in for_gpus if plugin not in left_out}

    def choose(config: RunConfig, origins: Mapping[str, str]) -> tuple[Choice, ...]:
        facts = machine_facts() if machine is None else machine
        if facts.parameters is None and facts.shape is None:
            facts = gather_facts(config, facts)
        return choose_defaults(config, origins, facts, next(iter(on_gpus), ""))

    hooks, loaded = _configured(files, overrides, plugins, choose)
    chosen = [choice.value for choice in loaded.choices if choice.key == "rollout.backend" and not choice.set_by]
    missing = [on_gpus[name] for name in chosen if name in on_gpus and on_gpus[name] not in loaded.config.plugins]
    return _configured(files, overrides, [*plugins, *missing], choose) if missing else (hooks, loaded)


def _offered_for_gpus() -> list[tuple[str, str]]:
    """(plugin, rollout backend) of the installed plugins for GPUs, best first."""
    plugins = {plugin.name for plugin in installed()}
    return [(plugin, backend) for plugin, backend, _ in rollout_on_gpus() if plugin in plugins]


def _installed_for_gpus() -> list[tuple[str, str]]:
    """(plugin, rollout backend) of the installed plugins for GPUs whose library is installed too, best first."""
    plugins = {plugin.name for plugin in installed()}
    return [
        (plugin, backend)
        for plugin, backend, library in rollout_on_gpus()
        if plugin in plugins and importlib.util.find_spec(library) is not None
    ]


def _configured(
    files: Sequence[Path | Mapping[str, Any]], overrides: Sequence[str], plugins: Sequence[str], choose: Chooser
) -> tuple[Hooks, LoadedConfig]:
    sections = enabled_plugins(files, overrides, moved_keys())
    for name in sections:
        if name != canonical(name):
            raise ConfigError(f"plugins.{name}: a section is named with '_'; write plugins.{canonical(name)}")
    sources = {name: _source(name, section) for name, section in sections.items()}
    from_files = plugin_paths(files, overrides) if any(map(is_path, sources.values())) else {}
    sources |= {name: path for name, path in from_files.items() if is_path(sources[name])}
    further = [_path_setting(name, path) for name, path in from_files.items() if is_path(sources[name])]
    for plugin in plugins:
        if is_path(plugin):
            further.append(_path_setting(name_of(plugin), str(Path(plugin).absolute())))
            sources.pop(name_of(plugin), None)
        elif canonical(plugin) not in sources:
            further.append(f"plugins.{canonical(plugin)}={{}}")
    named = [plugin for plugin in plugins if is_path(plugin) or canonical(plugin) not in sources]
    hooks = load([*sources.values(), *named])
    return hooks, load_config(files, [*overrides, *further], hooks.config_sections(), choose)


def _path_setting(name: str, path: str) -> str:
    """The override that enables a plugin of a plain file."""
    text = json.dumps(path, ensure_ascii=False)  # YAML does not read JSON's pairs of escapes, such as of an emoji
    return f"plugins.{name}.path={text}"


def _source(name: str, section: Mapping[str, Any]) -> str:
    """The source of the plugin of a `plugins.NAME` section: its `path` if that is a .py file NAME.py, else NAME."""
    path = section.get("path")
    return path if isinstance(path, str) and is_path(path) and name_of(path) == canonical(name) else name
