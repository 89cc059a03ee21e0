"""The role `agent`: conversations in separate processes, which ask the run for every turn of the policy.

A rollout is one stream. Beside samples that have ended, the worker sends what it asks of the policy on it; answers come
as calls. So it is a call and a stream like others, on every cluster, and no socket is opened.
"""

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcore import load_tokens
from rlcore.contracts.activity import Activity, BegunWork, Span, as_current, summed
from rlcore.contracts.agents import RolloutTask
from rlcore.contracts.requests import Role
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.types import Completion, GenerateRequest, Lane, Prompt, Sampling, Trajectory
from rlcore_agent_loop.settings import AgentLoopSettings

if TYPE_CHECKING:
    from rlcore.contracts.tokens import Tokens
    from rlcore_agent_loop.loop import ToolLoop


@dataclass(frozen=True, eq=False)
class PolicyRequest:
    """The worker wants these requests' completions."""

    number: int
    """Of the question, within its rollout."""
    requests: tuple[GenerateRequest, ...]


@dataclass(frozen=True)
class Withdrawn:
    """The rest of a question has lost its callers."""

    number: int


@dataclass(frozen=True, eq=False)
class Answered:
    """A completion, to the question of that number."""

    number: int
    completion: Completion


@dataclass(frozen=True, eq=False)
class Ended:
    """A sample has ended; these are its parts."""

    segments: tuple[Trajectory, ...]
    spans: tuple[Span, ...] = ()
    """Work that has ended since the last message of this kind; times are since 1970, as clocks of machines differ."""


def moved(spans: Iterable[Span], seconds: float) -> tuple[Span, ...]:
    """The spans with this many seconds added to their times."""
    return tuple(Span(span.work._replace(began=span.work.began + seconds), span.ended + seconds) for span in spans)


@dataclass(frozen=True)
class UnderWay:
    """The work under way in this rollout, one entry per tool or environment; times are since 1970."""

    works: tuple[BegunWork, ...]

    def since(self, unix_offset: float) -> tuple[BegunWork, ...]:
        """The works on another clock: the one that needs `unix_offset` seconds more for a time since 1970."""
        return tuple(work._replace(began=work.began - unix_offset) for work in self.works)


Message = PolicyRequest | Withdrawn | Ended | UnderWay

LOOK_S = 1.0
"""Seconds between two looks at the work under way; the run is told of it only where it has changed."""


class AgentWorker(Worker):
    """Runs conversations."""

    @abstractmethod
    async def start(self, settings: AgentLoopSettings, window: int | None) -> None:
        """Start tools, environment and agents; `window` is how many tokens the engine takes, None if it does not say.

        ConfigError when the chat template cannot serve their messages.
        """

    @abstractmethod
    async def check(self, prompts: Sequence[Prompt]) -> None:
        """ConfigError naming a prompt that cannot be served; see `ToolLoop.check`."""

    @abstractmethod
    async def stop(self) -> None:
        """End what `start` began."""

    @abstractmethod
    def rollout(
        self,
        number: int,
        tasks: Sequence[RolloutTask],
        sampling: Sampling,
        lane: Lane,
        done: Collection[tuple[str, int]],
    ) -> AsyncIterator[Message]:
        """Each sample of each task as it ends, except for those that are `done`, and what is asked of the policy.

        `number` tells this rollout from others of the same worker.
        """

    @abstractmethod
    async def answer(self, number: int, answers: Sequence[Answered]) -> None:
        """Deliver the policy's answer; ignored when its rollout is over."""


AGENT = Role("agent", AgentWorker)


class PolicyProxy:
    """The rollout service as a worker sees it: questions go out, answers are brought."""

    def __init__(self) -> None:
        self.out: asyncio.Queue[Message | None] = asyncio.Queue()
        """Messages to the run; None: there is no more."""
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Queue[Completion]] = {}

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncGenerator[Completion, None]:
        """See `rlcore.contracts.rollout.Generator`; how long it may take and that each comes once is seen to by the
        run."""
        number, left = next(self._numbers), sum(request.n for request in requests)
        answers = self._open[number] = asyncio.Queue()
        self.out.put_nowait(PolicyRequest(number, tuple(requests)))
        try:
            while left:
                completion = await answers.get()
                left -= 1
                yield completion
        finally:
            del self._open[number]
            if left:
                self.out.put_nowait(Withdrawn(number))

    def answer(self, answers: Sequence[Answered]) -> None:
        """Hand answers to their callers, if these still wait."""
        for answer in answers:
            if answer.number in self._open:
                self._open[answer.number].put_nowait(answer.completion)


async def _tell(proxy: PolicyProxy, activity: Activity) -> None:
    """Tell the run of the work under way, until this is cancelled."""
    before = UnderWay(())
    while True:
        await asyncio.sleep(LOOK_S)
        works = [work._replace(began=work.began + activity.unix_offset) for work in summed(activity.under_way())]
        if (now := UnderWay(tuple(works))) != before:
            proxy.out.put_nowait(now)
            before = now


class LoopWorker(AgentWorker):
    """Runs the plugin's loop; its tools are in child processes of this one."""

    tokens: "Tokens"
    """Of the run, from `setup` on."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._rollouts: dict[int, PolicyProxy] = {}
        self._loop: ToolLoop | None = None

    def setup(self) -> None:
        """Load tokenizer and chat template."""
        config = self.context.config
        self.tokens = load_tokens(config.model, config.data.system_prompt)

    async def start(self, settings: AgentLoopSettings, window: int | None) -> None:
        """See `AgentWorker.start`."""
        from rlcore_agent_loop.loop import ToolLoop

        self._loop = ToolLoop(PolicyProxy(), self.tokens, self.context.children, settings, window)
        await self._loop.start()

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """See `AgentWorker.check`."""
        if self._loop is not None:
            self._loop.check_prompts(prompts)

    async def stop(self) -> None:
        """See `AgentWorker.stop`."""
        if self._loop is not None:
            await self._loop.close()

    async def rollout(
        self,
        number: int,
        tasks: Sequence[RolloutTask],
        sampling: Sampling,
        lane: Lane,
        done: Collection[tuple[str, int]],
    ) -> AsyncIterator[Message]:
        """See `AgentWorker.rollout`."""
        proxy = self._rollouts[number] = PolicyProxy()
        running = asyncio.create_task(self._run(proxy, tasks, sampling, lane, done))
        try:
            while (message := await proxy.out.get()) is not None:
                yield message
            await running
        finally:
            del self._rollouts[number]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(
        self,
        proxy: PolicyProxy,
        tasks: Sequence[RolloutTask],
        sampling: Sampling,
        lane: Lane,
        done: Collection[tuple[str, int]],
    ) -> None:
        activity = Activity("all")
        telling = asyncio.create_task(_tell(proxy, activity))
        try:
            if self._loop is not None:
                with as_current(activity):
                    async with aclosing(self._loop.samples(proxy, tasks, sampling, lane, done)) as samples:
                        async for parts in samples:
                            spans = moved(activity.take().spans(), activity.unix_offset)
                            proxy.out.put_nowait(Ended(tuple(parts), spans))
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            proxy.out.put_nowait(None)

    async def answer(self, number: int, answers: Sequence[Answered]) -> None:
        """See `AgentWorker.answer`."""
        if number in self._rollouts:
            self._rollouts[number].answer(answers)
