"""How turns are sampled: first turns of a group together, later ones each by itself, as soon as it can begin."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlcore.agents import RolloutTask
from rlcore.errors import WorkerError
from rlcore.types import Completion, GenerateRequest, Lane, Sampling

if TYPE_CHECKING:
    from rlcore.rollout import Generator


def group_name(task: RolloutTask) -> str:
    """Names a group in requests; its conversations share a replica, whose cache holds their prompt."""
    return f"{task.prompt.id}/{task.epoch}"


class Turns:
    """Samples the turns of one rollout."""

    def __init__(self, generator: "Generator", sampling: Sampling, lane: Lane) -> None:
        self._generator, self._sampling, self._lane = generator, sampling, lane

    def first(self, task: RolloutTask, ids: Sequence[int], max_tokens: int) -> GenerateRequest:
        """The request for the first turns of a whole group."""
        name = group_name(task)
        sampling = replace(self._sampling, max_tokens=max_tokens)
        return GenerateRequest(name, tuple(ids), sampling, task.n, task.seed, conversation=name)

    async def sample_groups(
        self,
        requests: Sequence[GenerateRequest],
        waiting: "dict[tuple[str, int], asyncio.Future[Completion]]",
    ) -> None:
        """Resolve `waiting`, by (group, sample), as first turns come in; one call, so that the engine sees them all.

        A turn that nobody waits for is sampled too: what a sample draws depends on its place in the group.
        """
        async with aclosing(self._generator.generate(requests, self._lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                future = waiting.get((completion.request_id, completion.sample))
                if future is not None and not future.done():  # its conversation may have run out of time
                    future.set_result(completion)

    async def next(
        self, task: RolloutTask, sample: int, turn: int, ids: Sequence[int], max_tokens: int, stop: Sequence[str] = ()
    ) -> Completion:
        """One further turn; cancelling this cancels its generation."""
        name = group_name(task)
        # Each turn draws from a stream of its own, or all of them would begin with the same numbers.
        state = np.random.SeedSequence([task.seed, sample, turn]).generate_state(1, np.uint32)
        sampling = replace(self._sampling, max_tokens=max_tokens, stop=(*self._sampling.stop, *stop))
        request = GenerateRequest(f"{name}/{sample}/{turn}", tuple(ids), sampling, 1, int(state[0]), conversation=name)
        async with aclosing(self._generator.generate([request], self._lane)) as completions:  # type: ignore[type-var]
            found = [completion async for completion in completions]  # to the end: there is nothing to cancel then
        if found:
            return found[0]
        raise WorkerError(f"rollout: turn {turn} of {name}, sample {sample}, was never finished")
