"""Metrics of a training step, while evaluations use the same loop."""

import asyncio

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.testing import loop_of, says

from rlcore.contracts.agents import RolloutTask
from rlcore.data.tokenizer import ByteTokens
from rlcore.testing import open_children
from rlcore.testing.rewards import make_prompt
from rlcore.types import Lane, Metrics, Sampling


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_is_not_counted_in_the_metrics_of_a_training_step(workers: int) -> None:
    async def metrics_after(*lanes: Lane) -> Metrics:
        async with open_children(False) as children:
            loop = loop_of(says("done"), AgentLoopSettings(workers=workers), ByteTokens(), children)
            await loop.start()
            for lane in lanes:
                tasks = [RolloutTask(make_prompt(0), 0, 1 if lane is Lane.TRAIN else 5, 7)]
                budget = Sampling(max_tokens=100 if lane is Lane.TRAIN else 2)
                assert [row async for row in loop.rollout(tasks, budget, lane)]
            await loop.close()
            return loop.metrics()

    training = asyncio.run(metrics_after(Lane.TRAIN))
    assert training["agent/ended/stop_frac"] == 1.0
    assert asyncio.run(metrics_after(Lane.EVAL, Lane.TRAIN, Lane.EVAL)) == training
    assert asyncio.run(metrics_after(Lane.EVAL))["agent/turns_mean"] == 0.0
