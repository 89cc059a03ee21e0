"""Hints for errors about missing plugins and moved keys, from `rlcore/plan/catalog.toml`."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal

from rlcore.config.providers import Provider

MAX_OTHERS = 4
"""Plugins that are not enabled and that an error names; of more it gives the number."""


@cache
def _catalog() -> dict[str, Any]:
    return tomllib.loads(files("rlcore.plan").joinpath("catalog.toml").read_text("utf-8"))


def remedy(key: str, name: str | None = None, kind: str = "", others: Sequence[Provider] = ()) -> str:
    """The command and settings that make a name available for a config key; '' if unknown.

    Without a name it suggests the first one that a package provides. With `kind`, such as a worker's interface, names
    that the catalog lists for it count too. Of a plugin that is installed it says only how to enable it. If the catalog
    does not have the name, it names `others`: installed plugins that are not enabled and may offer it.
    """
    for package in _catalog()["package"]:
        names = package.get(key) or package.get(kind, [])
        if names and (name is None or name in names):
            chosen = name or names[0]
            typed = f"rlcore train ... --plugin {package['plugin']} {key}={chosen}"
            if _is_installed(package):
                return f"'{chosen}' is installed; enable it with `{typed}`"
            return f"'{chosen}' comes with `{package['install']}` in a clone of rlcore, and `{typed}`"
    return _enabling(others)


def _enabling(others: Sequence[Provider]) -> str:
    if not others:
        return ""
    more = f" and {len(others) - MAX_OTHERS} more" if len(others) > MAX_OTHERS else ""
    named = ", ".join(str(other) for other in others[:MAX_OTHERS])
    name = others[0].plugin if len(others) == 1 else "NAME"
    return f"installed but not enabled: {named}{more}; what offers it is enabled with `--plugin {name}`"


def _is_installed(package: Mapping[str, Any]) -> bool:
    """True if this Python has the plugin, and the library that it is about."""
    return all(find_spec(package[part]) is not None for part in ("module", "library") if part in package)


def install_hint(plugin: str) -> str:
    """The command that installs a first-party plugin; '' for any other plugin."""
    return next(
        (
            f"`{package['install']}` in a clone of rlcore"
            for package in _catalog()["package"]
            if package["plugin"] == plugin
        ),
        "",
    )


def moved_keys() -> Mapping[str, str]:
    """Configuration keys that moved to plugins, with their new place."""
    found: dict[str, str] = _catalog()["moved"]
    return found


def libraries() -> tuple[str, ...]:
    """Heavy libraries that first-party plugins wrap; importing a plugin must not import them."""
    return tuple(package["library"] for package in _catalog()["package"] if "library" in package)


def rollout_key(name: Literal["device_share", "replica_devices", "without_graphs"]) -> str:
    """A config key of the preferred GPU rollout backend: for the share of a device that a replica reserves, the number
    of a replica's devices, or engines that keep no CUDA graphs while they sleep."""
    package = next(package for package in _catalog()["package"] if "rollout_on_gpus" in package)
    return f"plugins.{package['plugin']}.{package[name]}"


def rollout_on_gpus() -> tuple[tuple[str, str, str], ...]:
    """(plugin, rollout backend, required library) of the backends made for GPUs, in order of preference."""
    found = [package for package in _catalog()["package"] if "rollout_on_gpus" in package]
    return tuple((package["plugin"], package["rollout_on_gpus"], package["library"]) for package in found)


def library_of(plugin: str) -> str:
    """The heavy library that a first-party plugin wraps; '' for any other plugin."""
    return next(
        (str(package.get("library", "")) for package in _catalog()["package"] if package["plugin"] == plugin), ""
    )
