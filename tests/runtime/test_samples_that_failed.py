"""A sample that could not be sampled has a failed reward, whatever its reward manager says of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rlcore.agents.single_turn import SingleTurn
from rlcore.contracts.agents import RolloutTask
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors.checks.arrays import check_trajectory
from rlcore.runtime.checked_components import CheckedRewards
from rlcore.testing.rewards import make_prompt
from rlcore.types import (
    ROLLOUT_ERROR,
    Completion,
    FinishReason,
    Lane,
    Reward,
    RewardStatus,
    Sampling,
    ScoredTrajectory,
    Trajectory,
)

WHY = "rollout: request 'p/0/0': replicas died 4 times while it was served: killed"


class Generator:
    """Samples one token, and not at all of sample 1."""

    async def generate(self, requests: Any, lane: Lane) -> AsyncIterator[Completion]:
        for request in requests:
            for sample in range(request.n):
                ids = np.full(int(sample != 1), 65, np.int32)
                why = WHY if sample == 1 else ""
                yield Completion(request.id, sample, ids, -ids.astype(np.float32), FinishReason.STOP, 0, error=why)


class Generous:
    """Scores every sample 1."""

    async def score(self, trajectories: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        async for trajectory in trajectories:
            yield ScoredTrajectory(trajectory, Reward(1.0))


def test_its_trajectory_has_no_sampled_token_and_its_reward_has_failed() -> None:
    async def run() -> list[ScoredTrajectory]:
        agent = SingleTurn(Generator(), ByteTokens())
        task = RolloutTask(make_prompt(), 0, 3, 7)
        rows = agent.rollout([task], Sampling(max_tokens=4), Lane.TRAIN)
        found = [row async for row in CheckedRewards(Generous(), "mine").score(rows, Lane.TRAIN)]
        return sorted(found, key=lambda row: row.trajectory.id)

    rows = asyncio.run(run())
    assert [row.reward.status for row in rows] == [RewardStatus.OK, RewardStatus.FAILED, RewardStatus.OK]
    failed = rows[1]
    assert failed.reward.score == 0.0
    assert failed.reward.info == {"error": WHY, "failed": {"rollout": WHY}}
    assert (failed.trajectory.num_sampled, failed.trajectory.versions) == (0, ())
    assert failed.trajectory.info[ROLLOUT_ERROR] == WHY
    for row in rows:
        check_trajectory("agent", row.trajectory)
