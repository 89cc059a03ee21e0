"""When things happened in a step, and what that says of the schedule."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rlcore.schedule.issued import Issued
from rlcore.schedule.oracle import StepTimes, step_ideal_s
from rlcore.types import Metrics


def now() -> float:
    """The running loop's clock."""
    return asyncio.get_running_loop().time()


@dataclass
class Timeline:
    """The phases of one step, on the loop's clock."""

    began: float = field(default_factory=now)
    sampled_at: float = 0.0
    """The sampling that must come before the first update had ended."""
    first_update_at: float = 0.0
    ended_at: float = 0.0
    waited_s: float = 0.0
    """While nothing but rewards was waited for."""
    pass_s: float = 0.0
    """In forward passes that need no reward."""
    update_s: list[float] = field(default_factory=list)
    _passing: bool = False
    _passed_at: float = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Rewards are waited for; that counts when no forward pass goes on."""
        begin = now()
        yield
        if not self._passing:
            self.waited_s += max(0.0, now() - max(begin, self._passed_at))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Forward passes go on."""
        begin, self._passing = now(), True
        try:
            yield
        finally:
            self._passing, self._passed_at = False, now()
        self.pass_s += now() - begin

    @contextmanager
    def updating(self) -> Iterator[None]:
        """An update goes on."""
        begin = now()
        if not self.update_s:
            self.first_update_at = begin
        yield
        self.update_s.append(now() - begin)

    def sample_end(self) -> None:
        """The sampling that must come before the first update has ended."""
        self.sampled_at = now()

    def end(self) -> None:
        """The step has been taken."""
        self.ended_at = now()
        self.first_update_at = self.first_update_at or self.ended_at

    def metrics(self, members: Sequence[Issued], stream: bool, minibatch_groups: int) -> Metrics:
        """Of the ended step that trained on `members`.

        schedule/ideal_s is what the step would have taken had nothing been lost between generation, rewards and
        updates as they were; schedule/overhead the share by which it took longer. reward/wait_exposed_s is the time in
        which nothing but rewards was waited for, reward/hidden_frac the share of the time with rewards pending in
        which something else went on.
        """
        step_s = self.ended_at - self.began
        times = StepTimes(
            sampled_s=self.sampled_at - self.began,
            prepare_s=self.pass_s,
            ready_s=[each.ready_at - self.began for each in members],
            update_s=self.update_s,
            minibatch_groups=minibatch_groups,
            stream=stream,
        )
        ideal_s = step_ideal_s(times)
        pending_s = _union_s([span for each in members for span in _pending(each)])
        return {
            "time/generate_s": self.sampled_at - self.began,
            "time/passes_s": self.pass_s,
            "time/updates_s": sum(self.update_s),
            "time/sample_s": self.first_update_at - self.began,
            "time/update_s": self.ended_at - self.first_update_at,
            "time/step_s": step_s,
            "time/reward_wait_s": self.waited_s,
            "schedule/ideal_s": ideal_s,
            "schedule/overhead": step_s / ideal_s - 1.0 if ideal_s > 0 else 0.0,
            "reward/wait_exposed_s": self.waited_s,
            "reward/hidden_frac": max(0.0, 1.0 - self.waited_s / pending_s) if pending_s > 0 else 1.0,
        }


def length_correlation(minibatch: Sequence[int], lengths: Sequence[int]) -> float:
    """Of the index of a row's mini-batch with its length: above 0, short samples are trained on first."""
    if len(set(minibatch)) < 2 or len(set(lengths)) < 2:
        return 0.0
    return float(np.corrcoef(minibatch, lengths)[0, 1])


def _pending(issued: Issued) -> list[tuple[float, float]]:
    """From when to when each sample waited for its reward."""
    scored, finished = issued.judged.complete, issued.finished.complete
    return [(finished[sample], end) for sample, end in scored.items() if sample in finished]


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, covered_to = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, covered_to))
        covered_to = max(covered_to, end)
    return total
