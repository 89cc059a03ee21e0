"""Rewards that come with the sample."""

from rlcore.errors import RewardError
from rlcore.types import Trajectory


def environment(trajectory: Trajectory) -> float:
    """The sum of the rewards that the sample's environment, or its agent, gave; RewardError where none was given.

    `reward.functions.x.fn=environment` uses it, alone or beside other functions.
    """
    reward = trajectory.info.get("environment_reward")
    if reward is None:
        why = trajectory.info.get("error") or f"the sample ended by {trajectory.info.get('ended_by', 'another agent')}"
        raise RewardError(f"the sample's environment gave no reward: {why}")
    return float(reward)
