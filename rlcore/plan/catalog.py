"""Words errors about what is not installed, from `rlcore/plan/catalog.toml`."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def _packages() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(files("rlcore.plan").joinpath("catalog.toml").read_text("utf-8"))["package"])


def remedy(key: str, name: str | None = None) -> str:
    """What to install and type so that the config key can take the name (or any name but those here); '' if unknown.

    The plugin of a name may be installed already and only not enabled, which the sentence covers.
    """
    for package in _packages():
        names = package.get(key, [])
        if names and (name is None or name in names):
            chosen = name or names[0]
            enable = f" --plugin {package['plugin']}" if package["plugin"] else ""
            return f"'{chosen}' comes with `{package['install']}` and `rlcore train ...{enable} {key}={chosen}`"
    return ""


def install_hint(plugin: str) -> str:
    """How to install a first-party plugin; '' if it is none."""
    return next((f"`{each['install']}`" for each in _packages() if plugin and each["plugin"] == plugin), "")
