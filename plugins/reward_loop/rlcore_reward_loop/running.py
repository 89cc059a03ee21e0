"""Running mean and deviation of a reward, frozen during a step so that no order of arrival can change a score."""

import math
from typing import Any


class RunningStatistics:
    """Welford's algorithm over the training samples of all earlier steps (doi 10.1080/00401706.1962.10490022)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0
        self._seen: dict[str, float] = {}

    @property
    def deviation(self) -> float:
        """Population standard deviation; 1.0 before there are two samples, or when all were equal."""
        deviation = math.sqrt(self._squares / self.count) if self.count > 1 else 0.0
        return deviation or 1.0

    def normalised(self, score: float) -> float:
        """The score minus the mean, over the deviation; itself in the first step."""
        return (score - self.mean) / self.deviation if self.count else score

    def see(self, id: str, score: float) -> None:
        """A training sample's score; it counts from the next `step` on."""
        self._seen[id] = score

    def step(self) -> None:
        """A step is over: what was seen counts, added in the order of the ids."""
        for _, score in sorted(self._seen.items()):
            self.count += 1
            distance = score - self.mean
            self.mean += distance / self.count
            self._squares += distance * (score - self.mean)
        self._seen.clear()

    def state(self) -> dict[str, Any]:
        """As JSON, with what was seen counted: a checkpoint stands between two steps."""
        copy = RunningStatistics()
        copy.restore({"count": self.count, "mean": self.mean, "squares": self._squares})
        copy._seen = dict(self._seen)
        copy.step()
        return {"count": copy.count, "mean": copy.mean, "squares": copy._squares}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
        self.count, self.mean, self._squares = int(state["count"]), float(state["mean"]), float(state["squares"])
        self._seen.clear()
