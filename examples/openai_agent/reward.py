"""The reward of this example."""

from rlcore.types import Trajectory


def is_right(trajectory: Trajectory) -> float:
    """1.0 if what the agent returned is the answer."""
    return float(trajectory.info.get("result") == str(trajectory.prompt.answer))
