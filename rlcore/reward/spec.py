"""What a process is told about the reward function that it serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FunctionSpec:
    """What is needed to load and call a function; picklable."""

    name: str
    reference: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "sample"
    answer_columns: Mapping[str, str] = field(default_factory=dict)
    """By source, what the user calls the answer's column."""
    max_steps: int = 0
    settings: Any = None
    """The settings section of the plugin that offers the function."""

    def __str__(self) -> str:
        return f"reward function '{self.name}' ({self.reference})"
