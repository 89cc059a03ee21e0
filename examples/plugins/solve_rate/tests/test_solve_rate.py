"""The estimator keeps its contract and weighs groups as it says."""

import pytest
import torch
from rlcore_solve_rate import rlcore_algorithms
from rlcore_solve_rate.estimator import solve_rate

from rlcore.algo.advantage import AdvantageInputs
from rlcore.testing import AdvantageEstimatorSuite

[OFFER] = rlcore_algorithms()


def advantages(rewards: list[float]) -> list[float]:
    """Of one group."""
    rows = len(rewards)
    inputs = AdvantageInputs(
        rewards_B=torch.tensor(rewards, dtype=torch.float32),
        group_B=torch.zeros(rows, dtype=torch.int64),
        sample_B=torch.arange(rows),
        lengths_B=torch.ones(rows, dtype=torch.int64),
    )
    return list(solve_rate(inputs).tolist())


@pytest.mark.parametrize(
    ("rewards", "factor"), [([1, 1, 0, 0], 1.0), ([1, 0, 0, 0], 0.75), ([1, 1, 1, 0], 0.75), ([1] * 4, 0.0)]
)
def test_a_group_counts_by_its_solve_rate(rewards: list[float], factor: float) -> None:
    mean = sum(rewards) / len(rewards)
    assert advantages(rewards) == pytest.approx([factor * (reward - mean) for reward in rewards])


def test_nothing_is_learned_of_a_group_without_a_reward_above_zero() -> None:
    assert advantages([-1.0, -2.0]) == [0.0, 0.0]


class TestSolveRate(AdvantageEstimatorSuite):
    target = OFFER
    scales = True
