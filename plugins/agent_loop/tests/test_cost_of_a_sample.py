"""Tasks and callbacks that a sample costs the event loop: counted, for a clock says something else in every hour."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlcore_agent_loop.loop import ToolLoop
from rlcore_agent_loop.settings import AgentLoopSettings

from rlcore.agents.single_turn import SingleTurn
from rlcore.config import RewardFunctionConfig
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.rollout import Generator
from rlcore.data.tokenizer import ByteTokens
from rlcore.reward.functions import build_function_rewards
from rlcore.testing.here import HereChildren
from rlcore.testing.prompts import seeded_prompts
from rlcore.testing.rewards import make_prompt, reward_context
from rlcore.train.buffer import Issuing, RolloutBuffer
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling

REWARDS = """
import asyncio

async def at_once(trajectory):
    return 1.0

async def waits(trajectory):
    await asyncio.sleep(0)
    return 1.0
"""
PROMPTS, GROUP = 8, 8
A_STEP = 16
"""Most tasks, and most callbacks, of a step in addition to those of its samples."""


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts what it is asked to run."""

    num_tasks = num_callbacks = 0

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        self.num_tasks += 1
        return super().create_task(coro, name=name, context=context)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        self.num_callbacks += 1
        return super().call_soon(callback, *args, context=context)


class AtOnce:
    """A generator that has every completion when it is asked, as when many come in one go."""

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        for request in requests:
            for sample in range(request.n):
                ids_N, logprobs_N = np.array([97, 256], dtype=np.int32), np.zeros(2, dtype=np.float32)
                yield Completion(request.id, sample, ids_N, logprobs_N, FinishReason.STOP, 0)


def single_turn(generator: Generator) -> AgentLoop:
    return SingleTurn(generator, ByteTokens())


def conversations(generator: Generator) -> AgentLoop:
    return ToolLoop(generator, ByteTokens(), HereChildren(), AgentLoopSettings())


def cost_of_a_step(agent: Callable[[Generator], AgentLoop], reward: str, directory: Path) -> tuple[int, int]:
    """(tasks, callbacks) between the issue of a step's prompts and their last reward."""
    (directory / "rewards.py").write_text(REWARDS)
    functions = {"f": RewardFunctionConfig(fn=f"{directory / 'rewards.py'}:{reward}")}
    order = seeded_prompts({"test": [make_prompt(index) for index in range(PROMPTS)]}, {}, 0, False)

    async def step() -> tuple[int, int]:
        manager = build_function_rewards(reward_context(functions, directory, HereChildren()))
        await manager.start()
        flight = RolloutBuffer(agent(AtOnce()), manager, order, Issuing(PROMPTS, GROUP, 0, Sampling()))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        before = loop.num_tasks, loop.num_callbacks
        flight.issue(PROMPTS, 1)
        ready = [await flight.next_ready(1) for _ in range(PROMPTS)]
        cost = loop.num_tasks - before[0], loop.num_callbacks - before[1]
        assert {len(pending.group()) for pending in ready} == {GROUP}
        assert {row.reward.score for pending in ready for row in pending.group()} == {1.0}
        await flight.close()
        await manager.close()
        return cost

    return run(step())


def run(work: Coroutine[Any, Any, tuple[int, int]]) -> tuple[int, int]:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        return runner.run(asyncio.wait_for(work, 30.0))


@pytest.mark.parametrize(("reward", "num_waits"), [("at_once", 0), ("waits", 1)])
@pytest.mark.parametrize(("agent", "num_tasks"), [(single_turn, 2), (conversations, 3)])
def test_a_sample_has_one_task_for_each_that_has_it(
    agent: Callable[[Generator], AgentLoop], num_tasks: int, reward: str, num_waits: int, tmp_path: Path
) -> None:
    """Its conversation, its reward from the one scorer, and the call of that scorer's function.

    A callback begins each of them, one more tells the reward of the call's end, and one each time the function waits.
    """
    found, num_callbacks = cost_of_a_step(agent, reward, tmp_path)
    assert found <= num_tasks * PROMPTS * GROUP + A_STEP
    assert num_callbacks <= (num_tasks + 1 + num_waits) * PROMPTS * GROUP + A_STEP
