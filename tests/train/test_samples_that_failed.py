"""A sample that could not be sampled has a failed reward, and changes no other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlcore.agents.single_turn import SingleTurn
from rlcore.config import RolloutConfig, RunConfig
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.scorer import Outcome, Scorer
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors.checks.arrays import check_trajectory
from rlcore.reward.functions import FunctionRewards
from rlcore.runtime.checked_components import CheckedAgent, CheckedRewards
from rlcore.testing.here import HereChildren
from rlcore.testing.rewards import make_prompt, reward_context
from rlcore.train.pending import collect
from rlcore.types import (
    ROLLOUT_ERROR,
    Completion,
    FinishReason,
    Lane,
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


class Rank(Scorer):
    """The share of the other samples of the group that have a smaller index."""

    name = "rank"
    scope = "group"

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        most = len(trajectories) - 1
        return [Outcome(RewardStatus.OK, place / most) for place, _ in enumerate(trajectories)]


def test_its_reward_has_failed_and_the_rank_of_the_others_is_that_of_a_group_without_it(tmp_path: Path) -> None:
    async def run() -> list[ScoredTrajectory]:
        agent = CheckedAgent(SingleTurn(Generator(), ByteTokens()), "agent")
        config = RunConfig(rollout=RolloutConfig(samples_per_prompt=4))
        manager = FunctionRewards(reward_context({}, tmp_path, HereChildren(), config=config), [Rank()])
        await manager.start()
        try:
            rewards = cast(RewardManager, CheckedRewards(manager, "mine"))
            task = RolloutTask(make_prompt(), 0, 4, 7)
            [group], _ = await collect(cast(AgentLoop, agent), rewards, [task], Sampling(max_tokens=4), Lane.TRAIN)
        finally:
            await manager.close()
        return group

    rows = asyncio.run(run())
    assert [row.reward.score for row in rows] == [0.0, 0.0, 0.5, 1.0]
    assert [row.reward.status for row in rows] == [RewardStatus.OK, RewardStatus.FAILED, *[RewardStatus.OK] * 2]
    failed = rows[1]
    assert failed.reward.score == 0.0
    assert failed.reward.info == {"error": WHY, "failed": {"rollout": WHY}}
    assert (failed.trajectory.num_sampled, failed.trajectory.versions) == (0, ())
    assert failed.trajectory.info[ROLLOUT_ERROR] == WHY
    for row in rows:
        check_trajectory("agent", row.trajectory)
