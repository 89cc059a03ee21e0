"""One pass of a stream of trajectories through the reward functions."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from rlcore.errors import PluginError
from rlcore.reward.calls import FunctionCalls
from rlcore.reward.combine import combine
from rlcore.reward.outcome import Outcome
from rlcore.types import Lane, Reward, Scored, Trajectory, TrajectoryId


class Units:
    """Puts the parts of each sample together: they are one unit, and are scored once, on the last of them.

    A sample is complete when as many parts have come as each of them says (`Trajectory.num_parts`); with 0 it is
    complete when the stream ends.
    """

    def __init__(self) -> None:
        self._waiting: dict[TrajectoryId, dict[int, Trajectory]] = {}
        self._complete: set[TrajectoryId] = set()

    def add(self, trajectory: Trajectory) -> list[Trajectory] | None:
        """The parts of the sample, in order, when this one completes it. PluginError for one part too many."""
        unit, part = trajectory.id.unit(), trajectory.id.part
        parts = self._waiting.setdefault(unit, {})
        if unit in self._complete or part in parts:
            raise PluginError(
                f"agent loop: {trajectory.id} came twice, or after its sample was complete with num_parts="
                f"{trajectory.num_parts}; every part must come once and say how many there are"
            )
        parts[part] = trajectory
        return self._finish(unit) if len(parts) == trajectory.num_parts else None

    def rest(self) -> list[list[Trajectory]]:
        """The samples that are complete because the stream has ended."""
        for parts in self._waiting.values():
            for each in parts.values():
                if each.num_parts > 0:
                    raise PluginError(f"agent loop: {each.id} says num_parts={each.num_parts}; {len(parts)} came")
        return [self._finish(unit) for unit in list(self._waiting)]

    def _finish(self, unit: TrajectoryId) -> list[Trajectory]:
        self._complete.add(unit)
        parts = self._waiting.pop(unit)
        return [parts[part] for part in sorted(parts)]


@dataclass(eq=False)
class _Gathering:
    """Samples that one call will score together."""

    trajectories: list[Trajectory] = field(default_factory=list)
    opinions: list["asyncio.Future[Outcome]"] = field(default_factory=list)


class RewardStream:
    """Scores each sample of a stream as it completes; a group's functions when the group has."""

    def __init__(self, functions: Sequence[FunctionCalls], lane: Lane, group_size: int) -> None:
        self._functions, self._lane, self._group_size = functions, lane, group_size
        self._scored: asyncio.Queue[tuple[list[Trajectory], Reward] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[Outcome]] = set()
        self._failure: BaseException | None = None
        self._gatherings: dict[tuple[str, str, int], _Gathering] = {}

    async def results(self, stream: AsyncIterator[Trajectory]) -> AsyncIterator[tuple[list[Trajectory], Reward]]:
        """Each sample's parts with its reward, in the order rewards arrive; what the stream raises passes."""
        reading = asyncio.create_task(self._read(stream), name="trajectories to their rewards")
        reading.add_done_callback(lambda _: self._scored.put_nowait(None))
        try:
            while (result := await self._scored.get()) is not None:
                yield result
            if self._failure is not None:
                raise self._failure
            await reading
        finally:
            # A task that never ran cannot cancel what it was to wait for, so every task is ended here.
            everything = (reading, *self._tasks, *self._asking)
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _read(self, stream: AsyncIterator[Trajectory]) -> None:
        units = Units()
        async for trajectory in stream:
            if (parts := units.add(trajectory)) is not None:
                self._spawn(parts)
        for parts in units.rest():
            self._spawn(parts)
        for key in list(self._gatherings):
            self._call_gathering(key)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, parts: list[Trajectory]) -> None:
        opinions = [self._opinion(function, parts[-1]) for function in self._functions]
        self._keep(asyncio.create_task(self._score(parts, opinions), name=f"reward of {parts[-1].id}"))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
            self._scored.put_nowait(None)

    async def _score(self, parts: list[Trajectory], opinions: "list[asyncio.Future[Outcome]]") -> None:
        began = time.monotonic()
        outcomes = await asyncio.gather(*opinions)
        by_name = {function.spec.name: each for function, each in zip(self._functions, outcomes, strict=True)}
        weights = {function.spec.name: function.weight for function in self._functions}
        self._scored.put_nowait((parts, combine(by_name, weights, time.monotonic() - began)))

    def _opinion(self, function: FunctionCalls, trajectory: Trajectory) -> "asyncio.Future[Outcome]":
        if function.spec.scope == "sample":
            asking = asyncio.create_task(self._score_one(function, trajectory))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            return asking
        group = ("", 0) if function.spec.scope == "batch" else (trajectory.id.prompt, trajectory.id.epoch)
        key = (function.spec.name, *group)
        gathering = self._gatherings.setdefault(key, _Gathering())
        opinion: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        gathering.trajectories.append(trajectory)
        gathering.opinions.append(opinion)
        if function.spec.scope == "group" and len(gathering.trajectories) == self._group_size:
            self._call_gathering(key)
        return opinion

    async def _score_one(self, function: FunctionCalls, trajectory: Trajectory) -> Outcome:
        return (await function.score([trajectory], self._lane))[0]

    def _call_gathering(self, key: tuple[str, str, int]) -> None:
        function = next(each for each in self._functions if each.spec.name == key[0])
        self._keep(asyncio.create_task(self._score_gathering(function, self._gatherings.pop(key))))

    async def _score_gathering(self, function: FunctionCalls, gathering: _Gathering) -> None:
        order = sorted(range(len(gathering.trajectories)), key=lambda index: gathering.trajectories[index].id)
        outcomes = await function.score([gathering.trajectories[index] for index in order], self._lane)
        for index, outcome in zip(order, outcomes, strict=True):
            if not gathering.opinions[index].done():
                gathering.opinions[index].set_result(outcome)


def rows(parts: Sequence[Trajectory], reward: Reward) -> list[Scored]:
    """Every part with the sample's reward; scores per token belong to the part that was judged, the last."""
    others = replace(reward, token_scores=None)
    return [Scored(each, reward if each is parts[-1] else others) for each in parts]
