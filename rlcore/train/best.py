"""The best of a series of values, for early stopping and for the best checkpoint."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlcore.config.stopping import StopConfig
from rlcore.errors import ConfigError, nearest
from rlcore.report.metric_names import CORE, declared
from rlcore.train.evaluate import scored_metrics
from rlcore.types import Metrics


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """True if the value is better by more than `min_delta`; NaN never is, and the first number is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best + min_delta if mode == "max" else value < best - min_delta


def best_step(evaluations: Iterable[tuple[int, Metrics]], metric: str, mode: str) -> int | None:
    """The first step, from 1 on, whose evaluation is the best; None when no such evaluation has the metric."""
    found: tuple[int, float] | None = None
    for step, metrics in evaluations:
        value = metrics.get(metric, math.nan)
        if step > 0 and is_better(value, None if found is None else found[1], mode):
            found = (step, value)
    return None if found is None else found[0]


def check_named(key: str, metric: str, evaluations: Sequence[Metrics], k: int) -> None:
    """ConfigError when the last evaluation shows that evaluations do not have the metric that `key` names.

    A metric over nothing is left out, so an evaluation may lack one that it could have had, where rewards failed: one
    that an earlier evaluation had, or of `scored_metrics` where too few of the source's samples have a score.
    """
    last = evaluations[-1]
    if not metric.startswith("eval/") or any(metric in evaluation for evaluation in evaluations):
        return
    source, _, name = metric.rpartition("/")
    is_scored = f"{source}/mean" in last
    if last.get(f"{source}/failed") and (name in scored_metrics(k) or (name == f"maj@{k}" and not is_scored)):
        return
    raise ConfigError(f"{key}: evaluations do not have '{metric}'; {nearest(metric, sorted(last))}")


@dataclass
class StopRule:
    """Counts values that are not better; `train.stop` says of which metric, and how many end the run."""

    config: StopConfig
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    """Values since the best one."""
    last_step: int = 0

    def add(self, step: int, metrics: Metrics) -> None:
        """Add the step's value, if there is one; NaN counts as not better."""
        if not self.config.metric or self.config.metric not in metrics:
            return
        self.last_step = step
        value = metrics[self.config.metric]
        if is_better(value, self.best, self.config.mode, self.config.min_delta):
            self.best, self.best_step, self.since_best = value, step, 0
        else:
            self.since_best += 1

    def check_recorded(self, step: Metrics, rewards: Sequence[str]) -> None:
        """ConfigError when the first step of this process does not have the metric, and no later step would.

        A metric over nothing is left out of a step, so one that is declared may be absent: of the run's `rewards`,
        where its name holds one. No choice is a time: they are half of the names, and rarely meant.
        """
        metric = self.config.metric
        if not metric or metric.startswith("eval/") or metric in step or self.last_step:
            return
        names = ("", *rewards)  # "": most metrics belong to no reward
        kinds = (
            replace(kind, name=kind.name.replace("<function>", name)) for kind in declared([CORE]) for name in names
        )
        if not any(kind.matches(metric) for kind in kinds):
            choices = sorted(name for name in step if not name.startswith("time/"))
            raise ConfigError(f"train.stop.metric: steps do not have '{metric}'; {nearest(metric, choices)}")

    def add_all(self, records: Sequence[Metrics]) -> None:
        """Add the values of a continued run from its records."""
        for record in records:
            self.add(int(record["step"]), record)

    @property
    def reason(self) -> str:
        """Reason why the run ends now; empty when it continues."""
        if not self.config.metric or self.since_best < self.config.patience:
            return ""
        best = "no value was a number" if self.best is None else f"best {self.best:.4g} at step {self.best_step}"
        return (
            f"{self.config.metric} did not get better {self.since_best} times in a row ({best}): the run ends early, "
            "as train.stop says"
        )
