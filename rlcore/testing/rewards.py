"""Trajectories and a build context for tests of rewards."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardConfig, RewardFunctionConfig, RolloutConfig, RunConfig
from rlcore.contracts.children import Children
from rlcore.contracts.components import BuildContext, ResolvedReward
from rlcore.contracts.offers import Scope
from rlcore.contracts.requests import Role
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.workers import WorkerGroup
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import PlanError
from rlcore.reward.functions import FunctionRewards, build_function_rewards
from rlcore.types import FinishReason, FrozenDict, Lane, Prompt, Reward, ScoredTrajectory, Trajectory, TrajectoryId

T = TypeVar("T")

WAIT_S = 30.0
"""Timeout in seconds of each use of a manager by these helpers."""


def make_prompt(index: int = 0, answer: Any = None, source: str = "test", **columns: Any) -> Prompt:
    """A prompt of one user message; its answer is the index by default."""
    return Prompt(
        id=f"{source}/{index}",
        messages=(FrozenDict({"role": "user", "content": f"question {index}"}),),
        answer=str(index) if answer is None else answer,
        source=source,
        columns=FrozenDict(columns),
    )


def make_trajectory(prompt: Prompt | int = 0, sample: int = 0, text: str | None = None, **fields: Any) -> Trajectory:
    """A finished trajectory: the prompt's bytes, then those of `text`, which were sampled with log-prob -1.

    `fields` replace fields of the Trajectory; `segment` replaces the segment of its id.
    """
    prompt = make_prompt(prompt) if isinstance(prompt, int) else prompt
    completion = f"{prompt.id} sample {sample}" if text is None else text
    question, response = f"question of {prompt.id}".encode(), completion.encode()
    mask = np.array([False] * len(question) + [True] * len(response))
    trajectory = Trajectory(
        id=TrajectoryId(prompt.id, 0, sample, fields.pop("segment", 0)),
        prompt=prompt,
        token_ids=np.array([*question, *response], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        completion=completion,
        finish=FinishReason.STOP,
        versions=((len(question), 0),),
    )
    return replace(trajectory, **fields)


def reward_context(
    functions: Mapping[str, RewardFunctionConfig],
    run_dir: Path,
    children: Children | None = None,
    reward: RewardConfig | None = None,
    config: RunConfig | None = None,
    section: Any = None,
) -> BuildContext:
    """The context from which a run would build a reward manager, except that targets are taken unchanged.

    `fn` of each function is 'module:name' or '/path/file.py:name'; `children` defaults to real child processes.
    """
    config = config or RunConfig(rollout=RolloutConfig(samples_per_prompt=4))
    config = replace(config, reward=replace(reward or RewardConfig(), functions=dict(functions)))

    def no_workers(role: Role[Any]) -> WorkerGroup[Any]:
        raise PlanError(f"role '{role.name}': this context has no workers")

    return BuildContext(
        config=config,
        section=section,
        workers=no_workers,
        generator=None,
        reward_functions={name: _resolved(name, function) for name, function in functions.items()},
        tokens=ByteTokens(),
        children=children if children is not None else ChildProcesses(),
        run_dir=run_dir,
        seed=0,
        metrics=lambda name, value: None,
    )


def _resolved(name: str, function: RewardFunctionConfig) -> ResolvedReward:
    scope = Scope.SAMPLE if function.scope == "declared" else Scope(function.scope)
    return ResolvedReward(
        name,
        function.fn,
        "the test",
        function.weight,
        scope,
        function.deadline_s,
        function.kwargs,
        post_process=function.post_process,
    )


async def stream_of(trajectories: Sequence[Trajectory]) -> AsyncIterator[Trajectory]:
    """The trajectories, one per turn of the event loop."""
    for trajectory in trajectories:
        await asyncio.sleep(0)
        yield trajectory


async def score_all(
    manager: RewardManager, trajectories: Sequence[Trajectory], lane: Lane = Lane.TRAIN
) -> list[ScoredTrajectory]:
    """All scored trajectories, in the order in which the manager yields them; TimeoutError after 30 s."""
    async with asyncio.timeout(WAIT_S), aclosing(manager.score(stream_of(trajectories), lane)) as results:  # type: ignore[type-var]
        return [result async for result in results]


def use_rewards(
    functions: Mapping[str, RewardFunctionConfig],
    use: Callable[[FunctionRewards], Awaitable[T]],
    reward: RewardConfig | None = None,
    config: RunConfig | None = None,
) -> T:
    """The result of `use` with the core's manager of these functions, which is started before and closed afterwards."""

    async def main() -> T:
        children = ChildProcesses()
        manager = build_function_rewards(reward_context(functions, Path("unused"), children, reward, config))
        try:
            await manager.start()
            return await use(manager)
        finally:
            await manager.close()
            await children.close()

    return asyncio.run(main())


def score_rewards(
    functions: Mapping[str, RewardFunctionConfig],
    trajectories: Sequence[Trajectory],
    lane: Lane = Lane.TRAIN,
    reward: RewardConfig | None = None,
    config: RunConfig | None = None,
) -> dict[tuple[str, int, int], Reward]:
    """The reward of each trajectory by (prompt, sample, segment), computed in real children."""
    scored = use_rewards(functions, lambda manager: score_all(manager, trajectories, lane), reward, config)
    return {
        (sample.trajectory.id.prompt, sample.trajectory.id.sample, sample.trajectory.id.segment): sample.reward
        for sample in scored
    }
