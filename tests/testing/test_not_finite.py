"""Numbers that are not finite are never taken for equal ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algo.advantage import (
    AdvantageInputs,
    dr_grpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    turn_rloo,
    whitened,
)
from rlcore.algo.kl import FixedKl
from rlcore.algo.reward_shaping import rewards_all_equal
from rlcore.algo.step import with_advantages
from rlcore.config import AlgoConfig
from rlcore.data.batch import collate
from rlcore.errors import PluginError, RewardError
from rlcore.reward.step_metrics import reward_metrics
from rlcore.types import FinishReason, Prompt, Reward, ScoredTrajectory, Trajectory, TrajectoryId

NAN, INF = float("nan"), float("inf")


def scored(sample: int, score: float) -> ScoredTrajectory:
    one = np.ones(1, np.int32)
    row = Trajectory(
        TrajectoryId("p", 0, sample),
        Prompt("p", (), None, "test"),
        token_ids=one,
        loss_mask=one > 1,
        logprobs=np.zeros(1, np.float32),
        completion="",
        finish=FinishReason.STOP,
        versions=(),
    )
    return ScoredTrajectory(row, Reward(score))


def _inputs(*rewards: float) -> AdvantageInputs:
    num = len(rewards)
    mask_BT = torch.ones(num, 2, dtype=torch.bool)
    return AdvantageInputs(
        rewards_B=torch.tensor(rewards),
        group_B=torch.zeros(num, dtype=torch.int64),
        sample_B=torch.arange(num),
        lengths_B=mask_BT.sum(1),
        loss_mask_BT=mask_BT,
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "estimator", [grpo, dr_grpo, rloo, turn_rloo, opo, gpg, pass_at_k, reinforce_pp, reinforce_pp_baseline]
)
def test_rewards_that_are_not_finite_are_never_equal_ones(estimator: Callable[..., Any], bad: float) -> None:
    for rewards in ((bad, bad, bad), (0.0, bad, bad)):
        assert not estimator(_inputs(*rewards)).isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_whitening_and_the_counts_of_equal_groups_never_take_bad_numbers_for_equal_ones(bad: float) -> None:
    mask_BT = torch.tensor([[True, True, False]])
    for numbers in ((bad, bad, 0.0), (1.0, bad, 0.0), (bad, 1.0, 0.0)):
        assert not whitened(torch.tensor([numbers]), mask_BT)[mask_BT].isfinite().all()
    for pair in ((bad, bad), (1.0, bad), (bad, 1.0)):
        group = [scored(sample, score) for sample, score in enumerate(pair)]
        with np.errstate(invalid="ignore"):
            assert reward_metrics(group)["reward/zero_std_frac"] == 0.0
        with pytest.raises(RewardError, match=f"the reward of .* is {bad}; needs a finite number"):
            rewards_all_equal([group])


@pytest.mark.parametrize("per_token", [False, True])
def test_advantages_that_are_not_finite_are_refused_in_every_step(per_token: bool) -> None:
    batch = collate([[scored(0, 0.0), scored(1, 1.0)]], 0)
    shape = batch.tokens.loss_mask_BT.shape if per_token else (2,)
    for number, message in ((NAN, "nan"), (INF, "inf")):
        with pytest.raises(PluginError, match=rf"^algo\.advantage=grpo returned {message} for row 0.*finite ones"):
            with_advantages(batch, lambda _, n=number: torch.full(shape, n), per_token, AlgoConfig(), 8, FixedKl(0.0))  # type: ignore[misc]
    with pytest.raises(PluginError, match=r"^algo\.advantage=grpo: KeyError"):
        with_advantages(batch, lambda _: {}["x"], per_token, AlgoConfig(), 8, FixedKl(0.0))  # type: ignore[misc]
