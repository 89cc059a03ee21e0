"""A prompt in flight, and the pass that carries it from the agent loop to the reward manager.

Training, evaluation and greedy baselines run the same pass. `rlcore.runtime.checked_components` checks that every
sample arrives exactly once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from rlcore.contracts.activity import SAMPLE, BegunWork, SampleCounts, Span, current_activity
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.reward_manager import RewardManager
from rlcore.types import (
    ROLLOUT_ERROR,
    FrozenDict,
    Lane,
    Reward,
    RewardStatus,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

Group = list[ScoredTrajectory]
"""The rows of a prompt, by sample and segment."""
Key = tuple[str, int]
"""(prompt id, epoch)"""
SegmentKey = tuple[int, int]
"""(sample, segment)"""


class Samples:
    """Tracks the complete samples of a group by their arrived segments."""

    def __init__(self) -> None:
        self.complete: dict[int, float] = {}
        """Time when each became complete, on the loop's clock."""
        self._num_parts: dict[int, int] = {}

    def add(self, row: Trajectory, now: float) -> None:
        """Count a segment; a sample of unknown length (`num_segments=0`) is complete at `end`."""
        sample = row.id.sample
        if row.num_segments != 1:
            num = self._num_parts[sample] = self._num_parts.get(sample, 0) + 1
            if num != row.num_segments:
                return
        self.complete[sample] = now

    def end(self, now: float) -> None:
        """Record that no further segment will arrive."""
        for sample in self._num_parts:
            self.complete.setdefault(sample, now)


@dataclass(eq=False)
class PendingGroup:
    """A prompt in flight."""

    task: RolloutTask
    number: int
    """Its index in the order of issue."""
    due: int
    """The step that trains on it, or the last one that may if steps take the first ready prompts."""
    version: int
    """Version of the weights when its sampling began: no token is older."""
    trajectories: dict[SegmentKey, Trajectory] = field(default_factory=dict)
    scored: dict[SegmentKey, ScoredTrajectory] = field(default_factory=dict)
    finished: Samples = field(default_factory=Samples)
    judged: Samples = field(default_factory=Samples)
    already_scored: frozenset[int] = frozenset()
    """Samples whose rewards are from a checkpoint; they are not requested again."""
    began: float = 0.0
    """Time when its sampling began, on the loop's clock."""
    sampled: bool = False
    """All its trajectories are finished."""
    ready: bool = False
    """All of them are scored."""
    ready_at: float = 0.0
    """Time when they were; later if its reward is compared with that of a baseline."""
    retired: bool = False

    @property
    def key(self) -> Key:
        return self.task.prompt.id, self.task.epoch

    @property
    def sampled_at(self) -> float:
        """Time when its last trajectory was finished; 0 if a checkpoint has all of them."""
        return max(self.finished.complete.values(), default=0.0)

    def group(self) -> Group:
        """Its scored trajectories by sample and part."""
        return [self.scored[place] for place in sorted(self.scored)]

    def scored_whole(self) -> Group:
        """The rows of samples whose every segment is scored; of a sample of unknown length, none before its end."""
        whole = self.judged.complete.keys() | self.already_scored
        return [row for row in self.group() if row.trajectory.id.sample in whole]

    def record_trajectory(self, row: Trajectory, now: float) -> None:
        """Record a finished trajectory."""
        self.trajectories[row.id.sample, row.id.segment] = row
        self.finished.add(row, now)

    def record_reward(self, row: ScoredTrajectory, now: float) -> bool:
        """Record a reward; True if every sample now has one."""
        self.scored[row.trajectory.id.sample, row.trajectory.id.segment] = row
        self.judged.add(row.trajectory, now)
        return _whole(self, self.judged)

    def restore(self, rows: Sequence[ScoredTrajectory], keep_partial: bool) -> None:
        """Restore scored trajectories of a checkpoint: those of complete groups, or all if partial groups are kept.

        A run that had larger groups had samples that this group lacks; they are left out.
        """
        samples: dict[int, list[ScoredTrajectory]] = {}
        for row in rows:
            samples.setdefault(row.trajectory.id.sample, []).append(row)
        whole = {
            sample: parts for sample, parts in samples.items() if parts[0].trajectory.num_segments in (0, len(parts))
        }
        wanted = range(self.task.n)
        if whole.keys() != set(wanted) and not keep_partial:
            return
        whole = {sample: parts for sample, parts in whole.items() if sample in wanted}
        for parts in whole.values():
            for row in parts:
                self.trajectories[row.trajectory.id.sample, row.trajectory.id.segment] = row.trajectory
                self.scored[row.trajectory.id.sample, row.trajectory.id.segment] = row
        self.already_scored = frozenset(whole)
        self.sampled = self.ready = len(whole) == self.task.n

    def forget(self) -> None:
        """Discard what `restore` restored of an incomplete group."""
        self.trajectories.clear()
        self.scored.clear()
        self.already_scored = frozenset()


@dataclass(frozen=True)
class PassCallbacks:
    """The callbacks of a pass."""

    sampled: Callable[[PendingGroup], None]
    ready: Callable[[PendingGroup], None]
    version: Callable[[], int]
    """The weights that sample now."""


async def run_pass(
    members: Sequence[PendingGroup],
    agent: AgentLoop,
    reward: RewardManager,
    sampling: Sampling,
    lane: Lane,
    callbacks: PassCallbacks,
    begin: asyncio.Event | None,
    done: asyncio.Event,
) -> None:
    """Issue the members together, and see each become sampled and ready.

    Each trajectory goes to its reward as soon as it is finished. One whose rollout failed does not go there, so that
    the rewards of its group are what they would be without it. Sampling starts after `begin`; `done` is set when it has
    ended. Everything is matched by id, never by position.
    """
    clock = asyncio.get_running_loop().time
    by_key = {member.key: member for member in members}

    async def trajectories() -> AsyncIterator[Trajectory]:
        """Yields trajectories whose reward is still needed, each as it finishes."""
        async with aclosing(agent.rollout([member.task for member in members], sampling, lane)) as rows:  # type: ignore[type-var]
            async for row in rows:
                member = by_key[row.id.prompt, row.id.epoch]
                if row.id.sample not in member.already_scored:
                    member.record_trajectory(row, clock())
                    if not member.sampled and _whole(member, member.finished):
                        callbacks.sampled(member)
                    if ROLLOUT_ERROR in row.info:
                        if member.record_reward(rollout_failed(row), clock()) and not member.ready:
                            callbacks.ready(member)
                    else:
                        yield row
        done.set()
        for member in members:
            member.finished.end(clock())
            if not member.sampled:
                callbacks.sampled(member)

    try:
        if begin is not None:
            await begin.wait()
        for member in members:
            if not member.already_scored:  # rows of a checkpoint are as old as they were
                member.version = callbacks.version()
            member.began = clock()
        async with aclosing(reward.score(trajectories(), lane)) as scored:  # type: ignore[type-var]
            async for row in scored:
                member = by_key[row.trajectory.id.prompt, row.trajectory.id.epoch]
                if member.record_reward(row, clock()) and not member.ready:
                    callbacks.ready(member)
    finally:
        done.set()
    for member in members:
        member.judged.end(clock())
        if not member.ready:
            callbacks.ready(member)


def rollout_failed(row: Trajectory) -> ScoredTrajectory:
    """The row with a failed reward: the engine, an agent or an environment failed, and not the policy."""
    error = str(row.info[ROLLOUT_ERROR])
    info = FrozenDict({"error": error, "failed": FrozenDict({"rollout": error})})
    return ScoredTrajectory(row, Reward(0.0, status=RewardStatus.FAILED, info=info))


async def collect(
    agent: AgentLoop, reward: RewardManager, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane
) -> tuple[list[Group], float]:
    """Every sample of every task, scored: one group per task, in the order of `tasks`.

    Also returns the seconds until the last trajectory was finished.
    """
    members = [PendingGroup(task, number, due=0, version=0) for number, task in enumerate(tasks)]
    began, activity = asyncio.get_running_loop().time(), current_activity()
    callbacks = PassCallbacks(sampled=_ignore, ready=_ignore, version=lambda: 0)
    phase = "evaluating" if lane is Lane.EVAL else "sampling baselines"
    with activity.counting(lambda: sample_counts(members), phase):
        await run_pass(members, agent, reward, sampling, lane, callbacks, None, asyncio.Event())
    activity.end_later(lambda: sample_spans(members))
    finished = [time for member in members for time in member.finished.complete.values()]
    return [member.group() for member in members], max(finished, default=began) - began


def _ignore(member: PendingGroup) -> None:
    """`collect` waits for the whole pass."""


def _whole(member: PendingGroup, samples: Samples) -> bool:
    return len(samples.complete) + len(member.already_scored) >= member.task.n


def sample_counts(members: Sequence[PendingGroup]) -> SampleCounts:
    """Counts of the members' samples by progress; thread-safe."""
    known = sum(len(member.already_scored) for member in members)
    return SampleCounts(
        sum(member.task.n for member in members),
        known + sum(len(member.finished.complete) for member in members),
        known + sum(len(member.judged.complete) for member in members),
    )


def sample_spans(members: Sequence[PendingGroup]) -> Iterator[Span]:
    """For each sample of this process: the time until it was finished, and from then until it was scored."""
    for member in members:
        for sample, finished_at in member.finished.complete.items():
            row = TrajectoryId(member.task.prompt.id, member.task.epoch, sample)
            yield Span(BegunWork(SAMPLE, "sampled", "", row, 1, member.began), finished_at)
            if (scored_at := member.judged.complete.get(sample)) is not None:
                yield Span(BegunWork(SAMPLE, "scored", "", row, 1, finished_at), scored_at)
