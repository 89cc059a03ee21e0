"""Truncated responses, soft length penalty, groups that say nothing."""

import numpy as np
import pytest

from rlcore.algo.aggregation import row_weights
from rlcore.algo.reward_shaping import keeps_loss, length_penalty, rewards_all_equal
from rlcore.errors import ConfigError
from rlcore.types import (
    FinishReason,
    FrozenDict,
    Prompt,
    Reward,
    RewardStatus,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

PROMPT = Prompt("source/0", (FrozenDict({"role": "user", "content": "?"}),), None, "source")


def scored(
    sample: int, score: float, part: int = 0, status: RewardStatus = RewardStatus.OK, extra: float = 0.0
) -> ScoredTrajectory:
    trajectory = Trajectory(
        id=TrajectoryId(PROMPT.id, 0, sample, part),
        prompt=PROMPT,
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0.0, -1.0], dtype=np.float32),
        completion="x",
        finish=FinishReason.STOP,
        versions=((1, 0),),
    )
    token_scores = np.array([0.0, extra], dtype=np.float32) if extra else None
    return ScoredTrajectory(trajectory, Reward(score, status=status, token_scores=token_scores))


def test_the_length_penalty_of_hand_computed_lengths() -> None:
    lengths_B = np.array([0, 80, 90, 95, 100, 120])
    penalties = length_penalty(lengths_B, np.arange(6), max_tokens=100, buffer=20, penalty=2.0)
    assert penalties.tolist() == [0.0, 0.0, -1.0, -1.5, -2.0, -2.0]


def test_the_length_penalty_agrees_with_equation_13() -> None:
    def plain(length: int) -> float:
        if length <= 64 - 24:
            return 0.0
        return ((64 - 24) - length) / 24 if length <= 64 else -1.0

    lengths_B = np.arange(80)
    expected = [plain(length) for length in lengths_B.tolist()]
    np.testing.assert_allclose(length_penalty(lengths_B, np.arange(80), 64, 24), expected, rtol=1e-6)


def test_parts_of_a_sample_have_one_length_and_one_penalty() -> None:
    assert length_penalty(np.array([50, 40, 50]), np.array([0, 0, 1]), 100, 20).tolist() == [-0.5, -0.5, 0.0]


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(ConfigError, match=r"algo.overlong_buffer=.*rollout.max_tokens=100"):
        length_penalty(np.array([1]), np.array([0]), 100, buffer)


def test_a_truncated_sample_loses_the_loss_of_all_its_parts() -> None:
    sample_B = np.array([0, 0, 1, 2])
    keep_B = keeps_loss(np.array([False, True, False, True]), sample_B)
    assert keep_B.tolist() == [False, False, True, False]
    weights_B = row_weights("token_mean", np.where(keep_B, [5, 5, 4, 7], 0), sample_B)
    assert weights_B.tolist() == [0.0, 0.0, 0.25, 0.0]


def test_groups_with_equal_rewards_are_found() -> None:
    groups = [
        [scored(0, 1.0), scored(1, 1.0)],
        [scored(0, 1.0), scored(1, 0.0)],
        [scored(0, 0.5)],
        [],
        [scored(0, 1.0), scored(1, 0.0, status=RewardStatus.FAILED)],
        [scored(0, 1.0, part=0), scored(0, 1.0, part=1), scored(1, 1.0)],
        [scored(0, 0.1 + 0.2), scored(1, 0.3)],
        [scored(0, 1.0), scored(1, 1.0, extra=0.5)],
    ]
    assert rewards_all_equal(groups) == [True, False, True, True, True, True, True, False]
