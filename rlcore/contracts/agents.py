"""The agent slot: turns prompts into trajectories."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.types import Lane, Metrics, Prompt, Sampling, Trajectory


@dataclass(frozen=True, eq=False)
class RolloutTask:
    """A prompt to sample a group for."""

    prompt: Prompt
    epoch: int
    n: int
    seed: int


class AgentLoop(ABC):
    """Produces trajectories."""

    async def start(self) -> None:
        """Make ready."""

    async def close(self) -> None:
        """Release everything."""

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Called once before the first request of a training, with every prompt that may be requested.

        ConfigError naming prompts that cannot be served.
        """

    @abstractmethod
    def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Every trajectory of every task, each as it finishes. All segments of a sample come, in any order."""

    def metrics(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
