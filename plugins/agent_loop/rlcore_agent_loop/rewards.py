"""Rewards that come with the sample."""

from rlcore.errors import RewardError
from rlcore.types import Trajectory
from rlcore_agent_loop.conversation.episode import FAILED


def environment(trajectory: Trajectory) -> float:
    """The sum of the rewards that the sample's environment, or its agent, gave; RewardError where none was given.

    So it is where the environment failed later: what the sum would have become is not known.
    `reward.functions.x.fn=environment` uses it, alone or beside other functions.
    """
    reward, ended_by = trajectory.info.get("environment_reward"), trajectory.info.get("ended_by", "another agent")
    why = trajectory.info.get("error") or f"the sample ended by {ended_by}"
    if reward is None:
        raise RewardError(f"the sample's environment gave no reward: {why}")
    if ended_by == FAILED:
        raise RewardError(f"the sample's environment gave {float(reward):g} and then failed: {why}")
    return float(reward)
