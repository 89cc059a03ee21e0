"""What runs in a tool's child process: the functions, and nothing of the run."""

from collections.abc import Mapping
from typing import Any

from rlcore.child import load_reference


class Toolbox:
    """Holds the functions; `rlcore.child` serves its methods."""

    def __init__(self, references: Mapping[str, str], max_result_chars: int) -> None:
        self._functions = {name: load_reference(reference) for name, reference in references.items()}
        self._max_result_chars = max_result_chars

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The function's result as text, cut off here, so that no long one crosses the pipe."""
        text = str(self._functions[name](**arguments))
        limit = self._max_result_chars
        return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} characters cut off)"
