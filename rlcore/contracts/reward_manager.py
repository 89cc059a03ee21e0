"""The reward slot: what scores trajectories as they finish."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from rlcore.contracts.offers import Scope
from rlcore.types import Lane, Metrics, ScoredTrajectory, Trajectory


class RewardManager(ABC):
    """Turns a stream of trajectories into a stream of scored ones, matched by id, in the order rewards arrive.

    Several streams may be under way at a time: one of each batch that the schedule has in flight, and an evaluation's.
    """

    @property
    def scope(self) -> Scope:
        """How much must be scored together. Of a group that is not scored whole, rewards outlive the run for SAMPLE."""
        return Scope.SAMPLE

    async def start(self) -> None:
        """Make ready: start children, connect. RewardError or ConfigError if that fails."""

    async def close(self) -> None:
        """Let go of everything; also after a failure, and more than once."""

    @abstractmethod
    def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        """Each trajectory with its reward, exactly once; a failure is `Reward(status=FAILED)`.

        All parts of a sample get the sample's reward. RewardError under the failure policy 'abort'.
        """

    def metrics(self) -> Metrics:
        """Numbers of the manager itself since the last call, such as 'reward/service_bound'."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned."""
