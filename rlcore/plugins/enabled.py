"""Imports the plugins that are enabled, and no others."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rlcore.config.providers import Provider
from rlcore.errors import CALLED, PluginError, boundary
from rlcore.imports import FILE_PLUGIN
from rlcore.plan.time_limit import limited
from rlcore.plugins.discover import canonical, check_not_core, find

API = "1"
"""The value that a plugin in a plain file states as `RLCORE_API`."""


@dataclass(frozen=True)
class LoadedPlugin:
    """An enabled plugin with its module."""

    provider: Provider
    module: ModuleType


def name_of(name_or_path: str) -> str:
    """The name of a plugin that is given by name or as the path of a .py file, whose stem is the name."""
    return canonical(Path(name_or_path).stem if is_path(name_or_path) else name_or_path)


def is_path(name_or_path: str) -> bool:
    """True for the path of a .py file, False for a plugin's name."""
    return name_or_path.endswith(".py")


def load_plugin(name_or_path: str) -> LoadedPlugin:
    """Import one plugin; a PluginError names plugin, distribution and cause."""
    return _load_file(Path(name_or_path)) if is_path(name_or_path) else _load_installed(name_or_path)


def _load_installed(name: str) -> LoadedPlugin:
    plugin = find(name)
    if ":" in plugin.module:
        raise PluginError(f"{plugin.provider}: its entry point '{plugin.module}' names an object; needs a module")
    with _importing(f"{plugin.provider}: importing {plugin.module}"):
        module = importlib.import_module(plugin.module)
    return LoadedPlugin(plugin.provider, module)


def _load_file(path: Path) -> LoadedPlugin:
    name, path = canonical(path.stem), path.absolute()
    provider = Provider(name, str(path), f"API {API}")
    check_not_core(name, [str(path)])
    if not path.is_file():
        raise PluginError(f"plugin '{name}': no file {path}")
    if not name.isidentifier():
        raise PluginError(f"plugin '{name}' ({path}): the file's stem is the plugin's name; needs a Python identifier")
    module_name = f"{FILE_PLUGIN}{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin '{name}' ({path}): not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    with _importing(f"plugin '{name}' ({path}): importing it"):
        spec.loader.exec_module(module)
    stated = getattr(module, "RLCORE_API", None)
    if stated != API:
        raise PluginError(f"plugin '{name}' ({path}): RLCORE_API is {stated!r}; needs RLCORE_API = {API!r}")
    return LoadedPlugin(provider, module)


@contextmanager
def _importing(whose: str) -> Iterator[None]:
    with boundary(whose, PluginError, CALLED), limited(whose):
        yield
