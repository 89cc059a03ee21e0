"""One pass of a stream of trajectories through the reward functions."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from rlcore.aio import Inbox
from rlcore.contracts.activity import REWARD, current_activity
from rlcore.contracts.scorer import Outcome, Scorer
from rlcore.errors import PluginError
from rlcore.reward.combine import combine
from rlcore.reward.held_info import within_budget
from rlcore.types import Lane, Reward, ScoredTrajectory, Trajectory, TrajectoryId


class SampleAssembler:
    """Assembles the segments of each sample, which are scored once, on the last segment.

    A sample is complete when the number of segments that each of them states (`Trajectory.num_segments`) has arrived;
    with 0, when the stream ends.
    """

    def __init__(self) -> None:
        self._waiting: dict[TrajectoryId, dict[int, Trajectory]] = {}
        self._complete: set[TrajectoryId] = set()

    def add(self, trajectory: Trajectory) -> list[Trajectory] | None:
        """The segments of the sample, in order, if this one completes it. PluginError for a surplus segment."""
        unit, part = trajectory.id.unit(), trajectory.id.segment
        if trajectory.num_segments == 1 and not self._waiting:
            known = len(self._complete)
            self._complete.add(unit)
            if len(self._complete) > known:
                return [trajectory]
        parts = self._waiting.setdefault(unit, {})
        if unit in self._complete or part in parts:
            raise PluginError(
                f"agent loop: {trajectory.id} came twice, or after its sample was complete with num_segments="
                f"{trajectory.num_segments}; every part must come once and say how many there are"
            )
        parts[part] = trajectory
        return self._finish(unit) if len(parts) == trajectory.num_segments else None

    def rest(self) -> list[list[Trajectory]]:
        """The samples that are complete at the end of the stream."""
        for parts in self._waiting.values():
            for part in parts.values():
                if part.num_segments > 0:
                    raise PluginError(f"agent loop: {part.id} says num_segments={part.num_segments}; {len(parts)} came")
        return [self._finish(unit) for unit in list(self._waiting)]

    def _finish(self, unit: TrajectoryId) -> list[Trajectory]:
        self._complete.add(unit)
        parts = self._waiting.pop(unit)
        return [parts[part] for part in sorted(parts)]


@dataclass(eq=False)
class _Gathering:
    """Samples that one call will score together."""

    trajectories: list[Trajectory] = field(default_factory=list)
    pending: list["asyncio.Future[Outcome]"] = field(default_factory=list)
    first: list["asyncio.Task[Outcome]"] = field(default_factory=list)
    """Outcome of each sample alone, for a scorer that post-processes the whole group."""


class RewardStream:
    """Scores each sample of a stream when it is complete; scorers of scope group, when the group is."""

    def __init__(self, scorers: Sequence[Scorer], lane: Lane, group_size: int) -> None:
        self._scorers, self._lane, self._group_size = scorers, lane, group_size
        # A sample with a single scorer does not need a second task, which costs as much as a quick score.
        alone = [scorer for scorer in scorers if scorer.scope == "sample" and not scorer.post_processes]
        self._alone = alone[0] if len(scorers) == len(alone) == 1 else None
        self._alone_name = "" if self._alone is None else self._alone.name
        self._weights = {scorer.name: scorer.weight for scorer in scorers}
        self._policies = {scorer.name: scorer.on_failure for scorer in scorers if scorer.on_failure}
        self._scored: Inbox[tuple[list[Trajectory], dict[str, Outcome], float] | None] = Inbox()
        """Segments, outcomes, and seconds; None at the end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        """Set when the last of the tasks has ended."""
        self._asking: set[asyncio.Task[Outcome]] = set()
        self._gatherings: dict[tuple[str, str, int], _Gathering] = {}
        self._activity = current_activity()

    async def results(self, stream: AsyncIterator[Trajectory]) -> AsyncIterator[tuple[list[Trajectory], Reward]]:
        """Each sample's segments with its reward, in order of arrival; exceptions of the stream pass through."""
        reading = asyncio.create_task(self._read(stream), name="trajectories to their rewards")
        reading.add_done_callback(self._end)
        try:
            while (scored := await self._scored.take()) is not None:
                parts, outcomes, took_s = scored
                reward = combine(outcomes, self._weights, took_s, self._policies)
                yield parts, within_budget(reward, outcomes)
        finally:
            # A task that never ran cannot cancel the tasks it should have awaited, so every task is ended here.
            everything = (reading, *self._tasks, *self._asking)
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _read(self, stream: AsyncIterator[Trajectory]) -> None:
        units = SampleAssembler()
        async for trajectory in stream:
            if (parts := units.add(trajectory)) is not None:
                self._spawn(parts)
        for parts in units.rest():
            self._spawn(parts)
        for key in list(self._gatherings):
            self._call_gathering(key)
        if self._tasks:  # `asyncio.wait` would add a callback to each of them
            self._idle.clear()
            await self._idle.wait()

    def _spawn(self, parts: list[Trajectory]) -> None:
        unit = parts[-1].id
        name = f"reward of {unit.prompt} {unit.epoch} {unit.sample}"
        if self._alone is not None:
            self._tasks.add(asyncio.create_task(self._score_alone(self._alone, parts), name=name))
        else:
            pending = [self._outcome(scorer, parts[-1]) for scorer in self._scorers]
            self._keep(asyncio.create_task(self._score(parts, pending), name=name))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._scored.fail(error)
        self._forget(task)

    def _forget(self, task: "asyncio.Task[None] | None") -> None:
        if task is not None:
            self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    def _end(self, reading: "asyncio.Task[None]") -> None:
        if reading.cancelled():
            self._scored.fail(asyncio.CancelledError())
        elif (error := reading.exception()) is not None:
            self._scored.fail(error)
        else:
            self._scored.put(None)

    async def _score_alone(self, scorer: Scorer, parts: list[Trajectory]) -> None:
        """Removes its own task unless it fails, which avoids a callback with another iteration of the loop."""
        began, task = time.monotonic(), asyncio.current_task()
        outcome: Outcome | None = None
        key = self._activity.begin(REWARD, self._alone_name, "", parts[-1].id)
        try:
            outcome = (await scorer.score([parts[-1]], self._lane))[0]
        finally:
            self._activity.end(key)
            if outcome is None and task is not None:
                task.add_done_callback(self._done)
        self._scored.put((parts, {self._alone_name: outcome}, time.monotonic() - began))
        self._forget(task)

    async def _score(self, parts: list[Trajectory], pending: "list[asyncio.Future[Outcome]]") -> None:
        began = time.monotonic()
        outcomes = await asyncio.gather(*pending)
        by_name = {scorer.name: outcome for scorer, outcome in zip(self._scorers, outcomes, strict=True)}
        self._scored.put((parts, by_name, time.monotonic() - began))

    def _outcome(self, scorer: Scorer, trajectory: Trajectory) -> "asyncio.Future[Outcome]":
        if scorer.scope == "sample" and not scorer.post_processes:
            return self._ask(scorer, trajectory)
        group = ("", 0) if scorer.scope == "batch" else (trajectory.id.prompt, trajectory.id.epoch)
        key = (scorer.name, *group)
        gathering = self._gatherings.setdefault(key, _Gathering())
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        gathering.trajectories.append(trajectory)
        gathering.pending.append(outcome)
        if scorer.scope == "sample":
            gathering.first.append(self._ask(scorer, trajectory))
        if scorer.scope != "batch" and len(gathering.trajectories) == self._group_size:
            self._call_gathering(key)
        return outcome

    def _ask(self, scorer: Scorer, trajectory: Trajectory) -> "asyncio.Task[Outcome]":
        asking = asyncio.create_task(self._score_one(scorer, trajectory))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return asking

    async def _score_one(self, scorer: Scorer, trajectory: Trajectory) -> Outcome:
        key = self._activity.begin(REWARD, scorer.name, "", trajectory.id)
        try:
            return (await scorer.score([trajectory], self._lane))[0]
        finally:
            self._activity.end(key)

    def _call_gathering(self, key: tuple[str, str, int]) -> None:
        scorer = next(scorer for scorer in self._scorers if scorer.name == key[0])
        self._keep(asyncio.create_task(self._score_gathering(scorer, self._gatherings.pop(key))))

    async def _score_gathering(self, scorer: Scorer, gathering: _Gathering) -> None:
        order = sorted(range(len(gathering.trajectories)), key=lambda index: gathering.trajectories[index].id)
        trajectories = [gathering.trajectories[index] for index in order]
        if gathering.first:
            first_outcomes = await asyncio.gather(*(gathering.first[index] for index in order))
        key = self._activity.begin(REWARD, scorer.name, "", trajectories[0].id, len(trajectories))
        try:
            if gathering.first:
                outcomes = await scorer.post_process(trajectories, first_outcomes, self._lane)
            else:
                outcomes = await scorer.score(trajectories, self._lane)
        finally:
            self._activity.end(key)
        for index, outcome in zip(order, outcomes, strict=True):
            if not gathering.pending[index].done():
                gathering.pending[index].set_result(outcome)


def rows(parts: Sequence[Trajectory], reward: Reward) -> list[ScoredTrajectory]:
    """Every segment with the sample's reward; token scores belong to the judged segment, the last."""
    if len(parts) == 1:
        return [ScoredTrajectory(parts[0], reward)]
    others = replace(reward, token_scores=None)
    return [ScoredTrajectory(part, reward if part is parts[-1] else others) for part in parts]
