"""Running mean and deviation of a reward: one scale for all samples of a group, in any order of arrival."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    """The statistics that scores are normalised by."""

    mean: float = 0.0
    deviation: float = 1.0

    def normalised(self, score: float) -> float:
        """The score minus the mean, over the deviation."""
        return (score - self.mean) / self.deviation


class RunningStatistics:
    """Welford's algorithm over the training samples of earlier steps (doi 10.1080/00401706.1962.10490022).

    Rewards of several steps may arrive at a time. Each group is normalised by one scale, taken when its stream of
    trajectories began. It enters the statistics at the end of the step in which the last of its samples has its whole
    reward, of which this may be a part. A group that is incomplete in a checkpoint is scored again after a resume, so
    none of it has been counted.
    """

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self._seen: dict[tuple[str, int], float] = {}
        self._incomplete: dict[str, Scale] = {}

    @property
    def deviation(self) -> float:
        """Population standard deviation; 1.0 with fewer than two samples, or when all were equal."""
        deviation = math.sqrt(self._squares / self.count) if self.count > 1 else 0.0
        return deviation or 1.0

    def scale(self) -> Scale:
        """The scale of the statistics as of now; in the first step it changes nothing."""
        return Scale(self.mean, self.deviation) if self.count else Scale()

    def begin(self, group: str, scale: Scale) -> None:
        """Announce a group; does nothing for one that has begun."""
        self._incomplete.setdefault(group, scale)

    def complete(self, group: str) -> None:
        """Every sample of the group has its whole reward."""
        self._incomplete.pop(group, None)

    def answered(self, group: str, sample: int, score: float | None) -> float:
        """A training sample's normalised score, to be counted with its group; a failed sample (None) never counts."""
        if score is None:
            return 0.0
        self._seen[group, sample] = score
        return self._incomplete.get(group, self.scale()).normalised(score)

    def end(self, groups: Iterable[str]) -> None:
        """No further samples of these groups will come. Groups left incomplete, as by a stop, never count."""
        incomplete = {group for group in groups if self._incomplete.pop(group, None) is not None}
        for key in [key for key in self._seen if key[0] in incomplete]:
            del self._seen[key]

    def step(self) -> None:
        """End a step: add the complete groups to the statistics, in the order of their names."""
        complete = sorted(key for key in self._seen if key[0] not in self._incomplete)
        for key in complete:
            score = self._seen.pop(key)
            self.count += 1
            distance = score - self.mean
            self.mean += distance / self.count
            self._squares += distance * (score - self.mean)

    def state(self) -> dict[str, Any]:
        """The state as JSON, as if the step were over."""
        copy = RunningStatistics()
        copy.restore({"count": self.count, "mean": self.mean, "squares": self._squares})
        copy._seen = {key: score for key, score in self._seen.items() if key[0] not in self._incomplete}
        copy.step()
        return {"count": copy.count, "mean": copy.mean, "squares": copy._squares}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])
        self._seen.clear()
        self._incomplete.clear()
