"""The settings of a plugin, typed as the class that its author declared."""

from typing import TypeVar

from rlcore.errors import PluginError

S = TypeVar("S")


def settings_as(who: str, section: object, cls: type[S]) -> S:
    """The section, typed as `cls`; PluginError naming `who` when it is of another class, or None.

    The section of a plugin without `ConfigSection` is None.
    """
    if isinstance(section, cls):
        return section
    found = "no settings" if section is None else f"settings of class {type(section).__name__}"
    raise PluginError(f"{who}: found {found}; needs {cls.__name__}; offer ConfigSection(name, {cls.__name__})")
