"""A prompt in flight, and the pass that carries it from the agent loop to the reward manager."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.errors import WorkerError
from rlcore.types import Lane, Sampling, ScoredTrajectory, Trajectory

Key = tuple[str, int]
"""(prompt id, epoch)"""
Place = tuple[int, int]
"""(sample, part)"""


class Samples:
    """Which samples of a group are complete, by the parts that have come of each."""

    def __init__(self) -> None:
        self.complete: dict[int, float] = {}
        """When each became complete, on the loop's clock."""
        self._num_parts: dict[int, int] = {}

    def add(self, row: Trajectory, now: float) -> None:
        """Count a part; a sample that does not know how many it has (`num_segments=0`) is complete when `end` says
        so."""
        sample = row.id.sample
        if row.num_segments != 1:
            num = self._num_parts[sample] = self._num_parts.get(sample, 0) + 1
            if num != row.num_segments:
                return
        self.complete[sample] = now

    def end(self, now: float) -> None:
        """No further part will come."""
        for sample in self._num_parts:
            self.complete.setdefault(sample, now)


@dataclass(eq=False)
class PendingGroup:
    """A prompt in flight."""

    task: RolloutTask
    number: int
    """Its place in the order of issue."""
    due: int
    """The step that trains on it; where steps take what is ready first, the last one that may."""
    version: int
    """Of the weights when its sampling began: no token of it is older."""
    trajectories: dict[Place, Trajectory] = field(default_factory=dict)
    scored: dict[Place, ScoredTrajectory] = field(default_factory=dict)
    finished: Samples = field(default_factory=Samples)
    judged: Samples = field(default_factory=Samples)
    already_scored: frozenset[int] = frozenset()
    """Samples whose rewards came with a checkpoint: they are not asked for again."""
    sampled: bool = False
    """All its trajectories are finished."""
    ready: bool = False
    """All of them are scored."""
    ready_at: float = 0.0
    retired: bool = False

    @property
    def key(self) -> Key:
        return self.task.prompt.id, self.task.epoch

    def group(self) -> list[ScoredTrajectory]:
        """Its scored trajectories by sample and part."""
        return [self.scored[place] for place in sorted(self.scored)]

    def take(self, row: Trajectory, now: float) -> None:
        """Take note of a finished trajectory."""
        self.trajectories[row.id.sample, row.id.segment] = row
        self.finished.add(row, now)

    def take_scored(self, row: ScoredTrajectory, now: float) -> None:
        """Take note of a reward; WorkerError when it came before."""
        place = row.trajectory.id.sample, row.trajectory.id.segment
        if place in self.scored:
            raise WorkerError(
                f"collector: trajectory {row.trajectory.id} was scored twice; each must come exactly once"
            )
        self.scored[place] = row
        self.judged.add(row.trajectory, now)

    def restore(self, rows: Sequence[ScoredTrajectory], keep_partial: bool) -> None:
        """Take up scored trajectories of a checkpoint: all samples, or those there are if each counts."""
        samples: dict[int, list[ScoredTrajectory]] = {}
        for row in rows:
            samples.setdefault(row.trajectory.id.sample, []).append(row)
        whole = {
            sample: parts for sample, parts in samples.items() if parts[0].trajectory.num_segments in (0, len(parts))
        }
        if len(whole) < self.task.n and not keep_partial:
            return
        for parts in whole.values():
            for row in parts:
                self.trajectories[row.trajectory.id.sample, row.trajectory.id.segment] = row.trajectory
                self.scored[row.trajectory.id.sample, row.trajectory.id.segment] = row
        self.already_scored = frozenset(whole)
        self.sampled = self.ready = len(whole) == self.task.n


@dataclass(frozen=True)
class PassCallbacks:
    """Whom a pass tells."""

    sampled: Callable[[PendingGroup], None]
    ready: Callable[[PendingGroup], None]
    version: Callable[[], int]
    """The weights that sample now."""


async def run_pass(
    members: Sequence[PendingGroup],
    agent: AgentLoop,
    reward: RewardManager,
    sampling: Sampling,
    notes: PassCallbacks,
    begin: asyncio.Event | None,
    done: asyncio.Event,
) -> None:
    """Issue the members together, and see each become sampled and ready.

    Sampling begins after `begin`; `done` is set when it has ended. WorkerError when a sample is missing, belongs to no
    member, or comes twice.
    """
    clock = asyncio.get_running_loop().time
    by_key = {each.key: each for each in members}

    async def trajectories() -> AsyncIterator[Trajectory]:
        """Those whose reward is still needed, each as it finishes."""
        async with aclosing(agent.rollout([each.task for each in members], sampling, Lane.TRAIN)) as rows:  # type: ignore[type-var]
            async for row in rows:
                issued = _member(by_key, row)
                if row.id.sample not in issued.already_scored:
                    issued.take(row, clock())
                    if not issued.sampled and _whole(issued, issued.finished):
                        notes.sampled(issued)
                    yield row
        done.set()
        for issued in members:
            issued.finished.end(clock())
            if not issued.sampled:
                notes.sampled(issued)

    try:
        if begin is not None:
            await begin.wait()
        for each in members:
            if not each.already_scored:  # rows of a checkpoint are as old as they were
                each.version = notes.version()
        async with aclosing(reward.score(trajectories(), Lane.TRAIN)) as scored:  # type: ignore[type-var]
            async for row in scored:
                issued = _member(by_key, row.trajectory)
                issued.take_scored(row, clock())
                if not issued.ready and _whole(issued, issued.judged):
                    notes.ready(issued)
    finally:
        done.set()
    for issued in members:
        issued.judged.end(clock())
        _check_complete(issued)
        if not issued.ready:
            notes.ready(issued)


def _member(by_key: dict[Key, PendingGroup], row: Trajectory) -> PendingGroup:
    issued = by_key.get((row.id.prompt, row.id.epoch))
    if issued is None:
        raise WorkerError(f"collector: trajectory {row.id} belongs to no prompt in flight")
    return issued


def _whole(issued: PendingGroup, samples: Samples) -> bool:
    return len(samples.complete) + len(issued.already_scored) >= issued.task.n


def _check_complete(issued: PendingGroup) -> None:
    missing = sorted(set(range(issued.task.n)) - issued.judged.complete.keys() - issued.already_scored)
    if missing:
        raise WorkerError(
            f"collector: prompt '{issued.task.prompt.id}' has no scored trajectory for samples {missing} of "
            f"{issued.task.n}; agent loop and reward manager must deliver every sample, failed ones as data"
        )
