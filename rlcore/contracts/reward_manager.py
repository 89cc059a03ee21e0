"""The reward slot: scores trajectories as they finish."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rlcore.contracts.offers import Scope
from rlcore.types import Lane, Metrics, ScoredTrajectory, Trajectory

BOUND_BY = "time/bound_by/"
"""Prefix of metrics. Their names end in the key of a setting that made reward calls wait."""
BOUND_FRAC = 0.5
"""A setting bounds the run if calls waited for it in at least this share of the time."""
NOTED_FRAC = 0.05


def bound_by(waits_s: Mapping[str, float], asked_s: float) -> Metrics:
    """time/bound_by/<setting>: the share of `asked_s` in which calls waited for more of that setting.

    Shares below 0.05 are left out. time/service_bound is 1.0 when one of them is at least 0.5, else 0.0.
    """
    shares = {setting: seconds / asked_s for setting, seconds in waits_s.items() if asked_s > 0}
    noted = {f"{BOUND_BY}{setting}": min(1.0, share) for setting, share in shares.items() if share >= NOTED_FRAC}
    return noted | {"time/service_bound": float(max(shares.values(), default=0.0) >= BOUND_FRAC)}


class RewardManager(ABC):
    """Turns a stream of trajectories into a stream of scored ones, matched by id, in the order rewards arrive.

    Several streams may run at a time: one per batch in flight, and one for an evaluation.
    """

    @property
    def scope(self) -> Scope:
        """The unit that is scored together. Checkpoints keep rewards of half-scored groups only with SAMPLE."""
        return Scope.SAMPLE

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each entry of `Reward.components` whose weighted sum is the score. Empty: it is another number.

        Estimators with `Need.FUNCTION_SCORES` need them.
        """
        return {}

    async def start(self) -> None:
        """Prepare for `score`: start children, connect. RewardError or ConfigError if that fails."""

    async def close(self) -> None:
        """Release everything. May be called after a failure, and more than once."""

    @abstractmethod
    def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        """Yields each trajectory with its reward exactly once; a failure is `Reward(status=FAILED)`.

        All segments of a sample get the sample's reward. RewardError under the failure policy 'abort'.
        """

    def metrics(self) -> Metrics:
        """Metrics of the manager since the last call, such as 'time/service_bound'."""
        return {}

    def state(self) -> dict[str, Any]:
        """The state that checkpoints keep, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
