"""Wraps the components of the three slots in checks of their results.

The core calls them through these objects, which have the methods of the slot's interface and pass everything else
through. An exception of a component becomes a PluginError that names component and method; an RlcoreError stays as it
is.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.contracts.offers import Scope
from rlcore.errors import CALLED, PluginError, boundary, shown
from rlcore.errors.checks.arrays import check_trajectory, checked_metrics, checked_scored, per_token
from rlcore.errors.checks.results import as_stream, awaitable, plain
from rlcore.errors.checks.same_prompt import other_field
from rlcore.runtime.hang_watch import HangWatch, WatchedCall
from rlcore.runtime.lane_settings import LaneSettings
from rlcore.types import (
    Batch,
    Float32s,
    Lane,
    Metrics,
    Prompt,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

if TYPE_CHECKING:
    from rlcore.contracts.agents import RolloutTask

_Row = tuple[str, int, int, int]
_Sample = tuple[str, int, int]


class _Checked:
    """A component with its name; unchecked attributes pass through."""

    _component: Any
    _who: str
    _watch: HangWatch | None

    def __init__(self, component: Any, who: str, watch: HangWatch | None = None) -> None:
        """`watch` reports calls that hang and streams that stall; None: not reported."""
        vars(self).update(_component=component, _who=who, _watch=watch)

    @property
    def __class__(self) -> type[Any]:
        """The component's class, so that `isinstance` sees through this object."""
        return type(self._component)

    @__class__.setter
    def __class__(self, cls: type[Any]) -> None:
        raise TypeError("a component's class stays what it is")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._component, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._component, name, value)

    @contextmanager
    def _boundary(self, what: str) -> Iterator[None]:
        """Wraps a call of the component: errors and reports of hangs name component and method."""
        who = f"{self._who}: {what}"
        with boundary(who, PluginError, CALLED), self._watch.watching(who) if self._watch else nullcontext():
            yield

    @contextmanager
    def _streaming(self, who: str) -> Iterator[WatchedCall]:
        """Wraps a stream of the component like `_boundary`; the yielded call is paused while it waits for its input."""
        owes = "has yielded nothing"
        with boundary(who, PluginError), self._watch.watching(who, owes) if self._watch else nullcontext() as call:
            yield call or WatchedCall(who, owes)

    def metrics(self) -> Metrics:
        """The component's own."""
        with self._boundary("metrics()"):
            return checked_metrics(f"{self._who}: metrics()", self._component.metrics(), PluginError)

    def state(self) -> dict[str, Any]:
        """The component's own."""
        with self._boundary("state()"):
            found: dict[str, Any] = plain(f"{self._who}: state()", self._component.state(), dict, "a dict")
            return found


class CheckedAgent(_Checked):
    """An agent loop that is checked to yield every trajectory of every task exactly once."""

    def __init__(
        self, component: Any, who: str, watch: HangWatch | None = None, lanes: LaneSettings | None = None
    ) -> None:
        """`lanes`: the rollout service that the component requests from; None: its settings are not checked."""
        super().__init__(component, who, watch)
        vars(self).update(_lanes=lanes)

    async def tool_schemas(self, prompts: Sequence[Prompt]) -> list[Sequence[Mapping[str, Any]]]:
        """See `AgentLoop.tool_schemas`."""
        with self._boundary("tool_schemas()"):
            who, needed = f"{self._who}: tool_schemas()", "a list with a list of schemas for each prompt"
            found = await awaitable(who, self._component.tool_schemas(prompts))
            lists = list(plain(who, found, (list, tuple), needed))
            if len(lists) != len(prompts):
                raise PluginError(f"{who} returned {len(lists)} of {len(prompts)} lists; needs one for each prompt")
            for schema in chain.from_iterable(plain(who, schemas, (list, tuple), needed) for schemas in lists):
                plain(who, schema, Mapping, "schemas that are dicts")
            return lists

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """See `AgentLoop.check`."""
        with self._boundary("check()"):
            await self._component.check(prompts)

    def restore(self, state: dict[str, Any]) -> None:
        """See `AgentLoop.restore`."""
        with self._boundary("restore()"):
            self._component.restore(state)

    async def rollout(
        self, tasks: "Sequence[RolloutTask]", sampling: Sampling, lane: Lane
    ) -> AsyncGenerator[Trajectory, None]:
        """See `AgentLoop.rollout`."""
        who = f"{self._who}: rollout()"
        if self._lanes is not None:
            self._lanes.record(sampling, lane)
        due = {(task.prompt.id, task.epoch): task for task in tasks}
        came: dict[_Row, int] = {}
        segments = _Segments(who, came)
        with self._streaming(who) as call:
            async with aclosing(as_stream(who, self._component.rollout(tasks, sampling, lane), PluginError)) as rows:
                async for row in rows:
                    check_trajectory(who, row)
                    place = _place(row.id)
                    task = due.get(place[:2])
                    if task is None or not 0 <= row.id.sample < task.n:
                        raise PluginError(f"{who} yielded trajectory {row.id}, which no task asked for")
                    if place in came:
                        raise PluginError(f"{who} yielded trajectory {row.id} twice; each must come exactly once")
                    if row.prompt is not task.prompt and (other := other_field(row.prompt, task.prompt)):
                        raise PluginError(
                            f"{who} yielded trajectory {row.id} whose prompt has another `{other}`, which rewards "
                            "would read; needs the Prompt of its task, with other messages in `opening`"
                        )
                    if segments.counts or row.num_segments != 1 or row.id.segment:
                        segments.add(place[:3], row)
                    came[place] = row.num_segments
                    call.pause()
                    yield row
                    call.resume_stream()
            segments.check_complete()
            samples = {place[:3] for place in came}
            for (prompt, epoch), task in due.items():
                missing = [sample for sample in range(task.n) if (prompt, epoch, sample) not in samples]
                if missing:
                    raise PluginError(
                        f"{who} ended without samples {missing} of the {task.n} of prompt '{prompt}'; every sample of "
                        "every task must come"
                    )


class _Segments:
    """Counts the segments of each sample, and compares them with the number that they state.

    Samples that are one segment need no count: `add` is called only after a segment of another sample.
    """

    def __init__(self, who: str, came: Mapping[_Row, int]) -> None:
        """`came`: the stated number of each segment that has come."""
        self.counts: dict[_Sample, tuple[int, int]] = {}
        """(segments that have come, the largest stated number)."""
        self._who, self._came = who, came
        self._complete: set[_Sample] = set()

    def add(self, sample: _Sample, row: Trajectory) -> None:
        """Count a segment. PluginError if its sample is complete without it."""
        if sample in self._complete or (sample not in self.counts and self._came.get((*sample, 0)) == 1):
            raise PluginError(
                f"{self._who} yielded trajectory {row.id} after its sample was complete, with num_segments="
                f"{row.num_segments}; every segment must come once and say how many there are"
            )
        num, stated = self.counts.get(sample, (0, 0))
        self.counts[sample] = num + 1, max(stated, row.num_segments)
        if num + 1 == row.num_segments:
            self._complete.add(sample)

    def check_complete(self) -> None:
        """PluginError for a sample with fewer segments than stated, or more; 0 leaves the number open."""
        for place, (num, stated) in self.counts.items():
            if stated and place not in self._complete:
                raise PluginError(
                    f"{self._who} ended with {num} segments of sample {place[2]} of prompt '{place[0]}', which state "
                    f"num_segments={stated}; every segment must come once and say how many there are"
                )


class CheckedRewards(_Checked):
    """A reward manager that is checked to score every given trajectory exactly once."""

    @property
    def scope(self) -> Scope:
        """See `RewardManager.scope`."""
        with self._boundary("scope"):
            found: Scope = plain(f"{self._who}: scope", self._component.scope, Scope, "a member of Scope")
            return found

    @property
    def weights(self) -> Mapping[str, float]:
        """See `RewardManager.weights`."""
        with self._boundary("weights"):
            needed = "a mapping of names to finite numbers"
            found = plain(f"{self._who}: weights", self._component.weights, Mapping, needed)
            for name, weight in found.items():
                if not isinstance(name, str) or not isinstance(weight, Real) or not math.isfinite(weight):
                    raise PluginError(f"{self._who}: weights holds {shown(name)}: {shown(weight)}; needs {needed}")
            return {name: float(weight) for name, weight in found.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """See `RewardManager.restore`."""
        with self._boundary("restore()"):
            self._component.restore(state)

    async def score(
        self, trajectories: AsyncIterator[Trajectory], lane: Lane
    ) -> AsyncGenerator[ScoredTrajectory, None]:
        """See `RewardManager.score`."""
        who = f"{self._who}: score()"
        with self._streaming(who) as call:
            pending = _Unscored(call)
            stream = as_stream(who, self._component.score(pending.noted(trajectories), lane), PluginError)
            async with aclosing(stream) as rows:
                async for found in rows:
                    row = checked_scored(who, found)
                    place = _place(row.trajectory.id)
                    if place not in pending.rows:
                        raise PluginError(f"{who} yielded trajectory {row.trajectory.id}, which it was not given")
                    before = pending.rows[place]
                    if before is None:
                        raise PluginError(
                            f"{who} yielded trajectory {row.trajectory.id} twice: it was scored twice; each must come "
                            "exactly once"
                        )
                    if not _same_tokens(row.trajectory, before):
                        raise PluginError(
                            f"{who} yielded trajectory {row.trajectory.id} with other tokens, loss mask or log-probs "
                            "than it was given; needs those that were sampled"
                        )
                    pending.rows[place] = None
                    call.pause()
                    yield row
                    call.resume_stream()
            pending.check_complete(who)


class _Unscored:
    """The trajectories that a reward manager was given."""

    def __init__(self, call: WatchedCall) -> None:
        """`call` does not count the time spent waiting for the next trajectory."""
        self._call = call
        self.rows: dict[_Row, Trajectory | None] = {}
        """None for trajectories whose reward has arrived."""
        self._ended = False

    async def noted(self, trajectories: AsyncIterator[Trajectory]) -> AsyncGenerator[Trajectory, None]:
        """Yields the trajectories, recording each one first."""
        async with aclosing(trajectories) as rows:  # type: ignore[type-var]
            self._call.pause()
            async for row in rows:
                self._call.resume()
                self.rows[_place(row.id)] = row
                yield row
                self._call.pause()
            self._call.resume()
        self._ended = True

    def check_complete(self, who: str) -> None:
        """PluginError unless every trajectory was taken and scored."""
        if not self._ended:
            raise PluginError(f"{who} ended before the stream of trajectories did; every one must be scored")
        if missing := [TrajectoryId(*place) for place, row in self.rows.items() if row is not None]:
            raise PluginError(
                f"{who} ended without {len(missing)} of the {len(self.rows)} trajectories that it was given, the "
                f"first {missing[0]}; every one must come, a failed one as Reward(status=FAILED)"
            )


class CheckedCritic(_Checked):
    """A critic engine whose values are checked to be numbers."""

    def __init__(self, component: Any, who: str, watch: HangWatch | None = None, *, needed: bool) -> None:
        """`needed`: an algorithm of the run reads values."""
        super().__init__(component, who, watch)
        vars(self).update(_needed=needed)

    async def expect(self, num_updates: int) -> int:
        """See `CriticEngine.expect`."""
        who = f"{self._who}: expect()"
        with self._boundary("expect()"):
            found = await awaitable(who, self._component.expect(num_updates))
            needed = f"the number of updates of the actor, 0 to {num_updates}"
            num = int(plain(who, found, int, needed))
            if isinstance(found, bool) or not 0 <= num <= num_updates:
                raise PluginError(f"{who} returned {found}; needs {needed}")
            return num

    async def begin_updates(self) -> None:
        """See `CriticEngine.begin_updates`."""
        with self._boundary("begin_updates()"):
            await self._component.begin_updates()

    async def end_updates(self) -> None:
        """See `CriticEngine.end_updates`."""
        with self._boundary("end_updates()"):
            await self._component.end_updates()

    async def values(self, batch: Batch) -> Float32s | None:
        """See `CriticEngine.values`."""
        who = f"{self._who}: values()"
        with self._boundary("values()"):
            found = await awaitable(who, self._component.values(batch))
            if found is None and not self._needed:
                return None
            return per_token(who, found, batch, PluginError, "values")

    async def update(self, minibatch: Batch) -> Metrics:
        """See `CriticEngine.update`."""
        who = f"{self._who}: update()"
        with self._boundary("update()"):
            return checked_metrics(who, await awaitable(who, self._component.update(minibatch)), PluginError)

    def actor_may_update(self) -> bool:
        """See `CriticEngine.actor_may_update`."""
        who = f"{self._who}: actor_may_update()"
        with self._boundary("actor_may_update()"):
            return bool(plain(who, self._component.actor_may_update(), (bool, np.bool_), "True or False"))

    async def save(self, directory: Path) -> None:
        """See `CriticEngine.save`."""
        with self._boundary("save()"):
            await self._component.save(directory)

    async def snapshot(self) -> bool:
        """See `CriticEngine.snapshot`."""
        who = f"{self._who}: snapshot()"
        with self._boundary("snapshot()"):
            found = await awaitable(who, self._component.snapshot())
            return bool(plain(who, found, (bool, np.bool_), "True or False"))

    async def write_snapshot(self, directory: Path) -> None:
        """See `CriticEngine.write_snapshot`."""
        with self._boundary("write_snapshot()"):
            await self._component.write_snapshot(directory)

    async def restore(self, directory: Path) -> None:
        """See `CriticEngine.restore`."""
        with self._boundary("restore()"):
            await self._component.restore(directory)

    def restore_state(self, state: dict[str, Any]) -> None:
        """See `CriticEngine.restore_state`."""
        with self._boundary("restore_state()"):
            self._component.restore_state(state)


def _same_tokens(one: Trajectory, other: Trajectory) -> bool:
    """True if both are the same trajectory, even if one was sent to another process and back."""
    pairs = [(one.token_ids, other.token_ids), (one.loss_mask, other.loss_mask), (one.logprobs, other.logprobs)]
    return one is other or all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in pairs)


def _place(row: TrajectoryId) -> _Row:
    return row.prompt, row.epoch, row.sample, row.segment
