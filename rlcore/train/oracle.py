"""Estimates the ideal speed of steps by replaying them under a scheduler that wastes no time.

One device does one job at a time, the earliest released first; a number of slots serve rewards first come, first
served. `step_ideal_s` replays one step from when its groups were ready, `replay` a whole run from when its samples were
finished and how long each reward took.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepTimes:
    """The parts of a step in seconds; moments count from its beginning and may be negative."""

    sampled_s: float
    """Time when the sampling that must precede the first update ended."""
    prepare_s: float
    """Duration of the forward passes that do not need rewards."""
    ready_s: Sequence[float]
    """Time when each group that was trained on had all its rewards, in any order."""
    update_s: Sequence[float]
    """Duration of each update, in order; all epochs."""
    minibatch_groups: int
    """Groups of an update; 0: all."""
    stream: bool
    """An update waits only for its groups, the first ones that are ready; otherwise for all."""


def step_ideal_s(step: StepTimes) -> float:
    """The least duration of the step."""
    now = max(0.0, step.sampled_s) + step.prepare_s
    releases = _releases(step)
    for number, duration in enumerate(step.update_s):
        if number < len(releases):
            now = max(now, releases[number])
        now += duration
    return now


def _releases(step: StepTimes) -> list[float]:
    """The time at which each mini-batch of the first epoch has its rewards."""
    ready = sorted(step.ready_s)
    if not ready:
        return []
    if not step.stream:
        return [ready[-1]]
    size = step.minibatch_groups or len(ready)
    return [ready[min(start + size, len(ready)) - 1] for start in range(0, len(ready), size)]


class ReplayService:
    """Calls served first come, first served, by `slots` servers; None: as many as there are calls."""

    def __init__(self, slots: int | None) -> None:
        self._free = [float("-inf")] * (slots or 0)
        self.busy_s = 0.0

    def serve(self, asked_s: float, duration_s: float) -> float:
        """The time of the answer to a call made at `asked_s`, which is not earlier than any before."""
        self.busy_s += duration_s
        if not self._free:
            return asked_s + duration_s
        ends = max(asked_s, self._free[0]) + duration_s
        heapq.heapreplace(self._free, ends)
        return ends


@dataclass(frozen=True)
class Draws:
    """The observed durations of a step."""

    finished_s: Sequence[float]
    """Time when each sample was finished, counted from when the generation of its step's prompts began."""
    reward_s: Sequence[float]
    """Seconds that the reward of each sample takes once it is served."""
    group: Sequence[int]
    """Group that each sample belongs to."""
    prepare_s: float
    update_s: Sequence[float]
    minibatch_groups: int = 0


@dataclass
class Replay:
    """A run under the oracle's schedule."""

    published_s: list[float] = field(default_factory=list)
    """Time when each step had ended, counted from the beginning of the run."""

    @property
    def step_s(self) -> list[float]:
        """The seconds of each step."""
        return [end - begin for begin, end in zip([0.0, *self.published_s], self.published_s, strict=False)]


def replay(steps: Sequence[Draws], *, max_staleness: int, stream: bool, slots: int | None) -> Replay:
    """The run: prompts of a step and of `max_staleness` further ones are sampled before the step is trained."""
    service, result = ReplayService(slots), Replay()
    ready: list[list[float]] = []
    now = 0.0
    for number, step in enumerate(steps):
        began = now
        while len(ready) <= min(number + max_staleness, len(steps) - 1):
            draws = steps[len(ready)]
            ready.append(_served(draws, now, service))
            now += max(draws.finished_s)
        times = StepTimes(
            sampled_s=now - began,
            prepare_s=step.prepare_s,
            ready_s=[time_s - began for time_s in ready[number]],
            update_s=step.update_s,
            minibatch_groups=step.minibatch_groups,
            stream=stream,
        )
        now = began + step_ideal_s(times)
        result.published_s.append(now)
    return result


def _served(draws: Draws, began_s: float, service: ReplayService) -> list[float]:
    """The time at which each group has all its rewards."""
    ready: dict[int, float] = {}
    for index in sorted(range(len(draws.finished_s)), key=lambda index: draws.finished_s[index]):
        ends = service.serve(began_s + draws.finished_s[index], draws.reward_s[index])
        ready[draws.group[index]] = max(ends, ready.get(draws.group[index], ends))
    return list(ready.values())
