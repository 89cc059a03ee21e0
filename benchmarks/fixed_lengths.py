"""The plugin `fixed_lengths`: an agent loop whose rows have given lengths, each by a separate token budget."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlcore import BuildContext, Component, ConfigSection, hookimpl
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.types import Completion, GenerateRequest, Lane, Sampling, Trajectory, TrajectoryId

RLCORE_API = "1"


@dataclass(frozen=True)
class FixedLengthsSection:
    """The section `plugins.fixed_lengths`."""

    lengths: tuple[int, ...] = ()
    """New tokens of each row, prompt by prompt, in the order of the prompts' ids."""


class FixedLengths(AgentLoop):
    """An agent loop with one turn and one request per sample."""

    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self._lengths: tuple[int, ...] = context.section.lengths

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Yields every sample of every task as it finishes."""
        origins: dict[str, tuple[RolloutTask, int, tuple[int, ...]]] = {}
        requests = []
        for task in tasks:
            ids = self._context.tokens.encode_prompt(task.prompt.messages)
            index = int(task.prompt.id.rpartition("/")[2])
            for sample in range(task.n):
                name = f"{task.prompt.id}/{task.epoch}/{sample:03d}"
                origins[name] = (task, sample, ids)
                length = self._lengths[(index * task.n + sample) % len(self._lengths)]
                own = replace(sampling, max_tokens=length)
                requests.append(GenerateRequest(name, ids, own, n=1, seed=task.seed + sample))
        async with aclosing(self._context.generator.generate(requests, lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                yield self._trajectory(*origins[completion.request_id], completion)

    def _trajectory(self, task: RolloutTask, sample: int, ids: tuple[int, ...], completion: Completion) -> Trajectory:
        num_prompt, num_sampled = len(ids), len(completion.token_ids)
        return Trajectory(
            id=TrajectoryId(task.prompt.id, task.epoch, sample),
            prompt=task.prompt,
            token_ids=np.concatenate([np.asarray(ids, dtype=np.int32), completion.token_ids]),
            loss_mask=np.arange(num_prompt + num_sampled) >= num_prompt,
            logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), completion.logprobs]),
            completion=self._context.tokens.decode(completion.token_ids.tolist()),
            finish=completion.finish,
            versions=((num_prompt, completion.version),),
        )


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("fixed_lengths", FixedLengthsSection, {"rollout.agent": "fixed_lengths"})]


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[Any]]:
    return [Component("fixed_lengths", FixedLengths)]
