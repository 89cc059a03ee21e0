"""The tool, how it is called, and the reward of this example."""

import re

from rlcore_agent_loop.tools.calls import ToolCall

from rlcore.types import Trajectory

CALL = re.compile(r"\s*add\((\d{1,9}), ?(\d{1,9})\)\s*")


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def calls(text: str) -> list[ToolCall]:
    """The call that a turn consists of, such as add(12, 7); none if it says anything else."""
    found = CALL.fullmatch(text)
    return [ToolCall("add", {"a": int(found[1]), "b": int(found[2])})] if found else []


def is_right(trajectory: Trajectory) -> float:
    """1.0 if the policy's last turn is not a call, and its last number is the sum."""
    if isinstance(trajectory.completion, str) or not trajectory.completion:
        return 0.0
    last = trajectory.completion[-1]
    text = str(last.get("content", ""))
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(last.get("role") == "assistant" and not calls(text) and numbers[-1:] == [trajectory.prompt.answer])
