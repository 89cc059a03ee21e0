"""The agent slot: turns prompts into trajectories."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.types import Lane, Metrics, Prompt, Sampling, Trajectory


@dataclass(frozen=True, eq=False)
class RolloutTask:
    """A prompt, for which a group of `n` samples is generated."""

    prompt: Prompt
    epoch: int
    n: int
    seed: int


class AgentLoop(ABC):
    """Produces trajectories."""

    async def start(self) -> None:
        """Prepare for `rollout`."""

    async def close(self) -> None:
        """Release everything."""

    async def tool_schemas(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """For each prompt, the schemas of the tools that the chat template shows to the policy, in OpenAI's form.

        Called once, after `start`: a prompt that is longer with them than `data.max_prompt_tokens` is left out. Without
        this method no prompt has any. ConfigError naming a prompt whose tools do not exist.
        """
        return [()] * len(prompts)

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Called once before the run requests its first sample, with every prompt that it may request.

        ConfigError naming the prompts that the loop cannot serve.
        """

    @abstractmethod
    def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Yields each trajectory of each task as it finishes: all segments of a sample, in any order.

        Requests to the generator must have this lane and this sampling, or the run ends. Only `max_tokens` may be
        smaller, and `stop` may have more strings.

        A sample that failed, because a turn could not be sampled or the loop's own parts raised, is yielded, too, with
        the reason under `ROLLOUT_ERROR` in the `info` of each segment: its reward fails, and nothing scores it.
        """

    def metrics(self) -> Metrics:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
