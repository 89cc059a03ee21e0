"""The reward of this example."""

from rlcore.types import Trajectory


def is_right(trajectory: Trajectory) -> float:
    """1.0 if the agent returned the answer, else 0.0."""
    return float(trajectory.info.get("result") == str(trajectory.prompt.answer))
