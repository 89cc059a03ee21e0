"""The tools and the reward of this example."""

import re

from rlcore.types import Trajectory


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return int(a) + int(b)


def sub(a: int, b: int) -> int:
    """Takes one whole number from another.

    Args:
        a: What is taken from.
        b: What is taken away.
    """
    return int(a) - int(b)


def is_right(trajectory: Trajectory) -> float:
    """1.0 if the last number of the policy's last words is the sum, and these are no call."""
    if isinstance(trajectory.completion, str) or not trajectory.completion:
        return 0.0
    last = trajectory.completion[-1]
    numbers = re.findall(r"\d+", str(last.get("content", "")).replace(",", ""))
    said = last.get("role") == "assistant" and "(a=" not in str(last.get("content", ""))
    return float(said and bool(numbers) and numbers[-1] == trajectory.prompt.answer)
