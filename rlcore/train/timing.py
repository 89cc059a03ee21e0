"""Times the phases of a step."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from rlcore.train.oracle import StepTimes, step_ideal_s
from rlcore.train.pending import PendingGroup
from rlcore.types import Metrics

Span = tuple[float, float]
"""(start, end)."""


def now() -> float:
    """The running loop's clock."""
    return asyncio.get_running_loop().time()


@dataclass
class StepTimeline:
    """The phases of one step, on the loop's clock."""

    began: float = field(default_factory=now)
    sampled_at: float = 0.0
    """Time when the sampling that must precede the first update ended."""
    first_update_at: float = 0.0
    ended_at: float = 0.0
    _sampling: list[Span] = field(default_factory=list)
    """Sampling after `sampled_at` that was waited for: of replaced prompts, of baselines, and of all with
    on_stale=drop."""
    _waits: list[Span] = field(default_factory=list)
    _passes: list[Span] = field(default_factory=list)
    _updates: list[Span] = field(default_factory=list)

    def waited(self, begin: float, sampled_at: float) -> None:
        """Record a wait that ends now: until `sampled_at` for samples, from then on for their rewards.

        Waits from the same moment are one wait for all: until the last samples, it is sampling.
        """
        end = now()
        self._sampling.append((begin, min(max(begin, sampled_at), end)))
        self._waits.append((begin, end))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Context for forward passes."""
        begin = now()
        yield
        self._passes.append((begin, now()))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context for an update."""
        begin = now()
        if not self._updates:
            self.first_update_at = begin
        yield
        self._updates.append((begin, now()))

    def sample_end(self) -> None:
        """Record the end of the sampling that must precede the first update."""
        self.sampled_at = now()

    def end(self) -> None:
        """Record the end of the step."""
        self.ended_at = now()
        self.first_update_at = self.first_update_at or self.ended_at

    def metrics(self, members: Sequence[PendingGroup], stream: bool, minibatch_groups: int) -> Metrics:
        """Metrics of the finished step that trained on `members`.

        time/ideal_s is what the step would have taken had nothing been lost between generation, rewards and
        updates as they were; time/overhead the share by which it took longer. time/generate_s is the time until
        `sampled_at`, and the later one in which nothing but samples was waited for. time/reward_wait_s is the time in
        which nothing but rewards was waited for, time/reward_hidden_frac the share of the time with rewards pending in
        which other work ran.
        """
        step_s, pass_s = self.ended_at - self.began, _union_s(self._passes)
        busy = [*self._passes, *self._updates]
        busy_s, with_sampling_s = _union_s(busy), _union_s([*busy, *self._sampling])
        waited_s = _union_s([*busy, *self._sampling, *self._waits]) - with_sampling_s
        update_s = [end - begin for begin, end in self._updates]
        times = StepTimes(
            sampled_s=self.sampled_at - self.began,
            prepare_s=pass_s,
            ready_s=[member.ready_at - self.began for member in members],
            update_s=update_s,
            minibatch_groups=minibatch_groups,
            stream=stream,
        )
        ideal_s = step_ideal_s(times)
        pending_s = _union_s([span for member in members for span in _pending(member)])
        return {
            "time/generate_s": self.sampled_at - self.began + with_sampling_s - busy_s,
            "time/passes_s": pass_s,
            "time/updates_s": sum(update_s),
            "time/sample_s": self.first_update_at - self.began,
            "time/update_s": self.ended_at - self.first_update_at,
            "time/step_s": step_s,
            "time/reward_wait_s": waited_s,
            "time/ideal_s": ideal_s,
            "time/overhead": step_s / ideal_s - 1.0 if ideal_s > 0 else 0.0,
            "time/reward_hidden_frac": max(0.0, 1.0 - waited_s / pending_s) if pending_s > 0 else 1.0,
        }


def length_correlation(minibatch: Sequence[int], lengths: Sequence[int]) -> float:
    """Correlation of the index of a row's mini-batch with its length: above 0, short samples are trained on first."""
    if len(set(minibatch)) < 2 or len(set(lengths)) < 2:
        return 0.0
    return float(np.corrcoef(minibatch, lengths)[0, 1])


def _pending(issued: PendingGroup) -> list[Span]:
    """The span in which each sample waited for its reward."""
    scored, finished = issued.judged.complete, issued.finished.complete
    return [(finished[sample], end) for sample, end in scored.items() if sample in finished]


def _union_s(spans: Sequence[Span]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, covered_to = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > covered_to:
            total += end - (begin if begin > covered_to else covered_to)
            covered_to = end
    return total
