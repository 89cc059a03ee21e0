"""Rewards that come with the sample."""

from rlcore.errors import RewardError
from rlcore.types import ROLLOUT_ERROR, Trajectory


def environment(trajectory: Trajectory) -> float:
    """The sum of the rewards from the sample's environment or agent; RewardError if it has no environment and its
    agent gave none.

    The sum is 0 for a sample that was cut off before the first `step`. Also RewardError if the environment, or the
    rollout, failed later, because the final sum is unknown. Use it as `reward.functions.x.fn=environment`, alone or
    with other functions.
    """
    reward, ended_by = trajectory.info.get("environment_reward"), trajectory.info.get("ended_by", "another agent")
    why = trajectory.info.get("error") or f"the sample ended by {ended_by}"
    if reward is None:
        raise RewardError(f"the sample's environment gave no reward: {why}")
    if ROLLOUT_ERROR in trajectory.info:
        raise RewardError(f"the sample's environment gave {float(reward):g} and then failed: {why}")
    return float(reward)
