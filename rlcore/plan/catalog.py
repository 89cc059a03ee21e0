"""Words errors about what is not installed and what has moved, from `rlcore/plan/catalog.toml`."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any


@cache
def _catalog() -> dict[str, Any]:
    return tomllib.loads(files("rlcore.plan").joinpath("catalog.toml").read_text("utf-8"))


def remedy(key: str, name: str | None = None, interface: str = "") -> str:
    """Says what to install, unless it is installed, and type so that the config key can take the name; '' if unknown.

    Without a name it speaks of the first one that comes with a package. With `interface`, that of a worker, names that
    the catalog lists for the interface count too.
    """
    for package in _catalog()["package"]:
        names = package.get(key) or package.get(interface, [])
        if names and (name is None or name in names):
            chosen = name or names[0]
            typed = f"rlcore train ... --plugin {package['plugin']} {key}={chosen}"
            if _is_installed(package):
                return f"'{chosen}' is installed; enable it with `{typed}`"
            return f"'{chosen}' comes with `{package['install']}` and `{typed}`"
    return ""


def _is_installed(package: Mapping[str, Any]) -> bool:
    """True if this Python has the plugin, and the library that it is about."""
    return all(find_spec(package[part]) is not None for part in ("module", "library") if part in package)


def install_hint(plugin: str) -> str:
    """The command that installs a first-party plugin; '' for any other plugin."""
    return next((f"`{package['install']}`" for package in _catalog()["package"] if package["plugin"] == plugin), "")


def moved_keys() -> Mapping[str, str]:
    """Configuration keys that plugins have taken over, with where they are now."""
    found: dict[str, str] = _catalog()["moved"]
    return found


def libraries() -> tuple[str, ...]:
    """Heavy libraries that first-party plugins are about: importing a plugin must not import them."""
    return tuple(package["library"] for package in _catalog()["package"] if "library" in package)


def device_share_key() -> str:
    """The key of the share of a device that the best rollout backend for GPUs reserves."""
    package = next(package for package in _catalog()["package"] if "rollout_on_gpus" in package)
    return f"plugins.{package['plugin']}.{package['device_share']}"


def rollout_on_gpus() -> tuple[tuple[str, str, str], ...]:
    """(plugin, rollout backend, library that it needs) of those that are made for GPUs, the best first."""
    found = [package for package in _catalog()["package"] if "rollout_on_gpus" in package]
    return tuple((package["plugin"], package["rollout_on_gpus"], package["library"]) for package in found)


def library_of(plugin: str) -> str:
    """The heavy library that a first-party plugin is about; '' for any other plugin."""
    return next(
        (str(package.get("library", "")) for package in _catalog()["package"] if package["plugin"] == plugin), ""
    )
