"""Offers with their providers, and the offer that the configuration reads: a settings section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlcore.errors.checks.data import (
    check_mapping,
    check_names,
    check_settings,
)

T = TypeVar("T")


@dataclass(frozen=True)
class ConfigSection:
    """A section of the configuration: a frozen dataclass, and defaults that its plugin sets elsewhere in the config."""

    name: str
    """For a plugin: its name; the section is `plugins.<name>`. The core's sections are at the top level."""
    type: type[Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the main config, below the user's files: {'reward.manager': 'judges'}."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_settings(self, "type")
        check_mapping(self, "defaults")


@dataclass(frozen=True)
class Provider:
    """The plugin or entry point that made an offer."""

    plugin: str
    distribution: str
    """The distribution's name, or the path of a plain file."""
    version: str
    kind: str = "plugin"
    """'plugin', or 'entry point' of the group rlcore.rewards."""
    package: str = ""
    """The package that the entry point names a part of; empty for a plain file and for the core."""

    def __str__(self) -> str:
        return f"{self.kind} '{self.plugin}' ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Offer(Generic[T]):
    """An offer with its provider."""

    value: T
    provider: Provider
