"""Samples turns: the first turns of a group together, later ones individually, as soon as each can begin."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlcore.contracts.agents import RolloutTask
from rlcore.errors import WorkerError
from rlcore.types import Completion, GenerateRequest, Lane, Sampling

if TYPE_CHECKING:
    from rlcore.contracts.rollout import Generator


def group_name(task: RolloutTask) -> str:
    """The name of a group in requests. Its conversations share a replica, which caches their prompt."""
    return f"{task.prompt.id}/{task.epoch}"


class TurnSampler:
    """Samples the turns of one rollout."""

    def __init__(self, generator: "Generator", sampling: Sampling, lane: Lane) -> None:
        self._generator, self._sampling, self._lane = generator, sampling, lane
        self._limited: dict[tuple[int, tuple[str, ...]], Sampling] = {}
        """Sampling settings by token limit and extra stops: most turns share them."""
        self._later = LaterTurns(generator, lane)

    def first(self, task: RolloutTask, ids: Sequence[int], max_tokens: int) -> GenerateRequest:
        """The request for the first turns of a whole group."""
        name = group_name(task)
        return GenerateRequest(name, tuple(ids), self._limit(max_tokens), task.n, task.seed, conversation=name)

    async def sample_groups(
        self, requests: Sequence[GenerateRequest], arrived: Callable[[tuple[str, int], Completion], None]
    ) -> None:
        """Pass each first turn to `arrived`, by (group, sample). One call, so that the engine sees them all."""
        async with aclosing(self._generator.generate(requests, self._lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                arrived((completion.request_id, completion.sample), completion)

    async def next(
        self, task: RolloutTask, sample: int, turn: int, ids: Sequence[int], max_tokens: int, stop: Sequence[str] = ()
    ) -> Completion:
        """One further turn; cancelling this cancels its generation."""
        name = group_name(task)
        # A separate random stream, or all turns would begin with the same numbers.
        seed = int(np.random.SeedSequence([task.seed, sample, turn]).generate_state(1, np.uint32)[0])
        sampling = self._limit(max_tokens, tuple(stop))
        request = GenerateRequest(f"{name}/{sample}/{turn}", tuple(ids), sampling, 1, seed, conversation=name)
        return await self._later.ask(request)

    def _limit(self, max_tokens: int, stop: tuple[str, ...] = ()) -> Sampling:
        found = self._limited.get((max_tokens, stop))
        if found is None:
            found = replace(self._sampling, max_tokens=max_tokens, stop=(*self._sampling.stop, *stop))
            self._limited[max_tokens, stop] = found
        return found


class LaterTurns:
    """Single turns, requested and cancelled individually; those requested at the same moment form one call.

    The round trip to the engine is paid once per call. A call continues while a caller waits for one of its turns. A
    turn whose caller has left is decoded until then, and discarded.
    """

    def __init__(self, generator: "Generator", lane: Lane) -> None:
        self._generator, self._lane = generator, lane
        self._gathering: dict[str, _Question] = {}
        """Requested in this iteration of the event loop."""

    async def ask(self, request: GenerateRequest) -> Completion:
        """The turn. If cancelled, returns once the engine has stopped it, or at once while others of its call wait."""
        loop = asyncio.get_running_loop()
        question = _Question(request, loop.create_future())
        if not self._gathering:
            loop.call_soon(self._send)
        self._gathering[request.id] = question
        try:
            return await question.answer
        except asyncio.CancelledError:
            await self._give_up(question)
            raise

    def _send(self) -> None:
        gathered, self._gathering = self._gathering, {}
        if gathered:  # the caller may have left
            _Call(gathered).begin(self._generator, self._lane)

    async def _give_up(self, question: "_Question") -> None:
        name, call = question.request.id, question.call
        if call is None:
            self._gathering.pop(name, None)
        elif call.questions.pop(name, None) is not None:
            call.num_cancelled += 1
            if not call.questions:
                await call.stop()


@dataclass(eq=False)
class _Question:
    """A turn with a waiting caller."""

    request: GenerateRequest
    answer: "asyncio.Future[Completion]"
    call: "_Call | None" = None
    """The call that it belongs to, once made."""


@dataclass(eq=False)
class _Call:
    """One call of the generator."""

    questions: dict[str, _Question]
    """Unanswered turns by the name of their request."""
    task: "asyncio.Task[None] | None" = None
    num_cancelled: int = 0
    """Turns whose callers have left."""

    def begin(self, generator: "Generator", lane: Lane) -> None:
        """Send the call. However it ends, every pending turn gets a result or an error."""
        for call in self.questions.values():
            call.call = self
        self.task = asyncio.create_task(self._ask(generator, lane))
        self.task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Cancel it, and wait until it has ended."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def _ask(self, generator: "Generator", lane: Lane) -> None:
        requests = [call.request for call in self.questions.values()]
        async with aclosing(generator.generate(requests, lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:  # to the end, so that nothing is left to cancel
                question = self.questions.pop(completion.request_id, None)
                if question is not None and not question.answer.done():
                    question.answer.set_result(completion)
                if self.num_cancelled and not self.questions:
                    break

    def _ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        for name, call in self.questions.items():
            if call.answer.done():
                continue
            if task.cancelled():
                call.answer.cancel()
            else:
                call.answer.set_exception(error or WorkerError(f"rollout: turn {name} was never finished"))
