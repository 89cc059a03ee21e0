"""Scores arithmetic: is the last number of the response the answer?"""

import re

from rlcore import FrozenDict, Reward, RewardFunction, Trajectory, hookimpl


def last_number(trajectory: Trajectory) -> Reward:
    """1.0 when the last number of the response equals the prompt's answer, else 0.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", trajectory.text())
    if not numbers:
        return Reward(score=0.0)
    correct = float(numbers[-1]) == float(trajectory.prompt.answer)
    return Reward(score=float(correct), info=FrozenDict({"answer": numbers[-1]}))


@hookimpl
def rlcore_reward_functions() -> list[RewardFunction]:
    return [RewardFunction(name="last_number", target="rlcore_example_arithmetic:last_number")]
