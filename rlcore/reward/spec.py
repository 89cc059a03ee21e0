"""Describes a reward function to the process that serves it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from rlcore.imports import FILE_PLUGIN, import_target


@dataclass(frozen=True)
class FunctionSpec:
    """The data to load and call a function; picklable."""

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "sample"
    answer_columns: Mapping[str, str] = field(default_factory=dict)
    """The user's name for the answer's column, by source."""
    max_steps: int = 0
    settings: Any = None
    """The settings section of the plugin that offers the function."""

    def __str__(self) -> str:
        return f"reward function '{self.name}' ({self.target})"


@dataclass(frozen=True)
class SentSection:
    """A settings section whose class is in a plain file, which another process can import only by its path."""

    target: str
    values: Mapping[str, Any]


def sent(section: Any) -> Any:
    """The section in a form that another process can unpickle."""
    if isinstance(section, dict):
        return {key: sent(value) for key, value in section.items()}
    if not is_dataclass(section) or isinstance(section, type):
        return section
    kind = type(section)
    module = sys.modules[kind.__module__]
    if not module.__name__.startswith(FILE_PLUGIN):
        return section
    values = {spec.name: sent(getattr(section, spec.name)) for spec in fields(section)}
    return SentSection(f"{module.__file__}:{kind.__qualname__}", values)


def received(section: Any) -> Any:
    """The argument of `sent`, as an instance of the class in the function's file."""
    if isinstance(section, dict):
        return {key: received(value) for key, value in section.items()}
    if not isinstance(section, SentSection):
        return section
    return import_target(section.target)(**{name: received(value) for name, value in section.values.items()})
