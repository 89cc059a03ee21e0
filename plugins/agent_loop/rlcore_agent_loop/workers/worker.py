"""The role `agent`: conversations in separate processes, which request every turn of the policy from the run.

A rollout is one stream. On it the worker sends finished samples and its requests to the policy; answers arrive as
calls. So it works on every cluster, without opening a socket.
"""

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """A request for completions."""

    number: int
    """Number of the question within its rollout."""
    requests: tuple[GenerateRequest, ...]


@dataclass(frozen=True)
class Withdrawn:
    """The callers of the rest of a question have left."""

    number: int


@dataclass(frozen=True, eq=False)
class Answered:
    """A completion for the question of that number."""

    number: int
    completion: Completion


@dataclass(frozen=True, eq=False)
class Ended:
    """A sample that has ended, with its parts."""

    segments: tuple[Trajectory, ...]
    spans: tuple[Span, ...] = ()
    """Work that ended since the last such message. Times are since 1970, because machines' clocks differ."""


def moved(spans: Iterable[Span], seconds: float) -> tuple[Span, ...]:
    """The spans with this many seconds added to their times."""
    return tuple(Span(span.work._replace(began=span.work.began + seconds), span.ended + seconds) for span in spans)


@dataclass(frozen=True)
class UnderWay:
    """The work in progress in this rollout, one entry per tool or environment. Times are since 1970."""

    works: tuple[BegunWork, ...]

    def since(self, unix_offset: float) -> tuple[BegunWork, ...]:
        """The entries on another clock, which is `unix_offset` seconds behind the time since 1970."""
        return tuple(work._replace(began=work.began - unix_offset) for work in self.works)


Message = PolicyRequest | Withdrawn | Ended | UnderWay

LOOK_S = 1.0
"""Seconds between checks of the work in progress; only changes are sent to the run."""


class AgentWorker(Worker):
    """Runs conversations."""

    @abstractmethod
    async def start(self, settings: AgentLoopSettings, window: int | None) -> None:
        """Start tools, environment and agents; `window` is the engine's context length, None if unknown.

        ConfigError when the chat template cannot serve their messages.
        """

    @abstractmethod
    async def tool_schemas(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """See `ToolLoop.tool_schemas`."""

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
        """Each sample of each task as it ends, except for `done` ones, and the requests to the policy.

        `number` identifies this rollout within the worker.
        """

    @abstractmethod
    async def answer(self, number: int, answers: Sequence[Answered]) -> None:
        """Deliver the policy's answers; ignored if their rollout is over."""


AGENT = Role("agent", AgentWorker)


class PolicyProxy:
    """The rollout service as a worker sees it: requests go out, answers come in."""

    def __init__(self) -> None:
        self.out: asyncio.Queue[Message | None] = asyncio.Queue()
        """Messages to the run; None ends them."""
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Queue[Completion]] = {}

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncGenerator[Completion, None]:
        """See `rlcore.contracts.rollout.Generator`. The run enforces deadlines, and one completion per turn."""
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
        """Hand answers to their callers, if they still wait."""
        for answer in answers:
            if answer.number in self._open:
                self._open[answer.number].put_nowait(answer.completion)


async def _tell(proxy: PolicyProxy, activity: Activity) -> None:
    """Report the work in progress to the run until cancelled."""
    before = UnderWay(())
    while True:
        await asyncio.sleep(LOOK_S)
        works = [work._replace(began=work.began + activity.unix_offset) for work in summed(activity.open_work())]
        if (now := UnderWay(tuple(works))) != before:
            proxy.out.put_nowait(now)
            before = now


class LoopWorker(AgentWorker):
    """Runs the plugin's loop; its tools are in child processes of this one."""

    tokens: "Tokens"
    """Tokenizer and chat template of the run, set by `setup`."""

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

        policy, children = PolicyProxy(), self.context.children
        self._loop = ToolLoop(policy, self.tokens, children, settings, window)
        await self._loop.start()

    async def tool_schemas(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """See `AgentWorker.tool_schemas`."""
        return self._loop.schemas_of(prompts) if self._loop is not None else [()] * len(prompts)

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
