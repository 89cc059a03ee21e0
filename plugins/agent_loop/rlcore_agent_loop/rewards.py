"""Rewards that come with the sample."""

import numpy as np

from rlcore.errors import RewardError
from rlcore.types import ROLLOUT_ERROR, Reward, Trajectory


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


def environment_by_turn(trajectory: Trajectory) -> Reward:
    """The sum of `environment`, with each step's reward on the last token of its turn, for estimators that use tokens.

    The score is the sum, which belongs to the sample's last token; the token scores move the rewards of earlier turns
    from there to those turns. The reward of a turn without tokens, and the number that an agent returned, stay. Other
    estimators see the sum. RewardError as in `environment`, and for a sample of several segments, because only tokens
    of the last segment can have a score.
    """
    total = environment(trajectory)
    if trajectory.num_segments > 1:
        raise RewardError(
            f"the sample has {trajectory.num_segments} segments; needs 1 to reward each turn, so a step without "
            "restart=True; the function environment takes any"
        )
    scores_T = np.zeros(len(trajectory.token_ids))
    for turn in trajectory.info["turns"]:
        if "reward" in turn and turn["num_tokens"]:
            scores_T[turn["start"] + turn["num_tokens"] - 1] += turn["reward"]
    scores_T[-1] -= scores_T.sum()  # the loop ends a trajectory at its last sampled token
    return Reward(total, token_scores=scores_T.astype(np.float32))
