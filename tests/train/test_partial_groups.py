"""Scorecard case 27: what is left of a group under each failure policy, and the advantages that follow, by hand."""

from typing import Any

import pytest
import torch

from rlcore.algo.advantage import AdvantageInputs, dr_grpo, rloo
from rlcore.config import RewardConfig, RewardFunctionConfig
from rlcore.data.batch import collate
from rlcore.reward.policy import Budget, apply_failures
from rlcore.testing.rewards import make_trajectory
from rlcore.types import FrozenDict, Reward, RewardStatus, ScoredTrajectory

FAILED = Reward(
    0.0, FrozenDict(), RewardStatus.FAILED, info=FrozenDict[str, Any]({"error": "f: x", "failed": {"f": "x"}})
)
GROUPS = [
    [Reward(1.0), FAILED, Reward(0.0), Reward(5.0)],
    [Reward(2.0), Reward(4.0)],
    [Reward(3.0), FAILED],
    [FAILED, FAILED],
]
# By (prompt, sample): the reward less the mean of those that count, with value: -1 in place of what failed.
LEFT_OUT = {(0, 0): -1.0, (0, 2): -2.0, (0, 3): 3.0, (1, 0): -1.0, (1, 1): 1.0, (2, 0): 0.0}
EXPECTED = {
    "drop_sample": LEFT_OUT,
    "retry": LEFT_OUT,
    "drop_group": {(1, 0): -1.0, (1, 1): 1.0},
    "value": {
        **{(0, 0): -0.25, (0, 1): -2.25, (0, 2): -1.25, (0, 3): 3.75},
        **{(1, 0): -1.0, (1, 1): 1.0, (2, 0): 2.0, (2, 1): -2.0, (3, 0): 0.0, (3, 1): 0.0},
    },
}


@pytest.mark.parametrize("policy", EXPECTED)
def test_the_advantages_of_partial_groups_are_those_that_are_documented(policy: Any) -> None:
    groups = [
        [ScoredTrajectory(make_trajectory(prompt, sample), reward) for sample, reward in enumerate(rewards)]
        for prompt, rewards in enumerate(GROUPS)
    ]
    config = RewardConfig(
        functions={"f": RewardFunctionConfig("x:y", on_failure=policy, failure_value=-1.0)}, error_budget_frac=1.0
    )
    kept, _ = apply_failures(groups, config, Budget(0, config))
    batch = collate(kept, 0)
    inputs = AdvantageInputs(
        torch.tensor(batch.rewards_B),
        torch.tensor(batch.group_B),
        torch.tensor(batch.sample_B),
        torch.tensor(batch.num_sampled_B),
    )
    places = [(int(row.trajectory.id.prompt.split("/")[1]), row.trajectory.id.sample) for rows in kept for row in rows]
    expected = EXPECTED[policy]
    assert dict(zip(places, dr_grpo(inputs).tolist(), strict=True)) == pytest.approx(expected)
    sizes = {prompt: sum(place[0] == prompt for place in places) for prompt, _ in places}
    scaled = {place: row * max(sizes[place[0]], 1) / max(sizes[place[0]] - 1, 1) for place, row in expected.items()}
    assert dict(zip(places, rloo(inputs).tolist(), strict=True)) == pytest.approx(scaled)
