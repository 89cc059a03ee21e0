"""Defaults that depend on the machine, and the chosen values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.config.sections import RunConfig

AUTO = "auto"
"""The value of `cluster.device` that leaves the choice to the machine."""
DEVICE = "cluster.device"


@dataclass(frozen=True)
class Choice:
    """The value of a key whose default depends on the machine."""

    key: str
    """The dotted key."""
    value: Any
    reason: str
    """Reason for the machine's default; empty if the key is set."""
    set_by: str = ""
    """The origin of a value that was set: a file, an override, a preset or a plugin; empty if it was chosen."""


Chooser = Callable[["RunConfig", Mapping[str, str]], Sequence[Choice]]
"""(configuration without the choices, origin of every dotted key) -> the choices for this machine."""


def no_choices(config: "RunConfig", origins: Mapping[str, str]) -> Sequence[Choice]:
    """The chooser of a configuration whose defaults are those of the sections, on the CPU."""
    return (Choice(DEVICE, "cpu", "the default"),)
