"""The collector: a stream of scored trajectories, in whatever order they arrive, becomes groups in canonical order."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.errors import WorkerError
from rlcore.types import Lane, Sampling, ScoredTrajectory, Trajectory

Group = list[ScoredTrajectory]


@dataclass
class CollectTimes:
    """When the phases of a step ended, in seconds since it began."""

    began: float = field(default_factory=time.monotonic)
    generated_s: float = 0.0
    """The last trajectory was finished."""
    scored_s: float = 0.0
    """The last reward was in."""


async def collect(
    agent: AgentLoop,
    reward: RewardManager,
    tasks: Sequence[RolloutTask],
    sampling: Sampling,
    lane: Lane,
) -> tuple[list[Group], CollectTimes]:
    """Every sample of every task, scored: one group a task, in the order of `tasks`, rows sorted by id.

    Each trajectory goes to its reward the moment it is finished. WorkerError when a sample is missing, comes twice or
    belongs to no task: nothing is ever matched by position.
    """
    timeline = CollectTimes()

    async def generated() -> AsyncIterator[Trajectory]:
        async with aclosing(agent.rollout(tasks, sampling, lane)) as trajectories:  # type: ignore[type-var]
            async for trajectory in trajectories:
                timeline.generated_s = time.monotonic() - timeline.began
                yield trajectory

    arrived: list[ScoredTrajectory] = []
    async with aclosing(reward.score(generated(), lane)) as scored:  # type: ignore[type-var]
        async for each in scored:
            arrived.append(each)
            timeline.scored_s = time.monotonic() - timeline.began
    return group_by_task(arrived, tasks), timeline


def group_by_task(arrived: Sequence[ScoredTrajectory], tasks: Sequence[RolloutTask]) -> list[Group]:
    """The scored trajectories as one group a task; each row exactly once, each sample of each task present."""
    groups: dict[tuple[str, int], dict[tuple[int, int], ScoredTrajectory]] = {(t.prompt.id, t.epoch): {} for t in tasks}
    for each in arrived:
        row = each.trajectory.id
        group = groups.get((row.prompt, row.epoch))
        if group is None:
            raise WorkerError(f"collector: trajectory {row} belongs to no prompt in flight")
        if (row.sample, row.segment) in group:
            raise WorkerError(f"collector: trajectory {row} was scored twice; each must come exactly once")
        group[row.sample, row.segment] = each
    for task in tasks:
        found = {sample for sample, _ in groups[task.prompt.id, task.epoch]}
        missing = sorted(set(range(task.n)) - found)
        if missing:
            raise WorkerError(
                f"collector: prompt '{task.prompt.id}' has no scored trajectory for samples {missing} of {task.n}; "
                "agent loop and reward manager must deliver every sample, failed ones as data"
            )
    return [[group[key] for key in sorted(group)] for group in groups.values()]
