"""The agent loop with conversations in workers of the role `agent`; the run only samples their turns."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rlcore.contracts.activity import current_activity
from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.dispatch import ReplicaDispatcher
from rlcore.contracts.workers import ReplicaHandle, WorkerGroup
from rlcore.errors import RlcoreError, WorkerError
from rlcore.types import Lane, Metrics, Prompt, Sampling, Trajectory
from rlcore_agent_loop.checks import located
from rlcore_agent_loop.conversation.prompt_checks import check_column
from rlcore_agent_loop.conversation.turn_sampler import group_name
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.workers.admission import SampleLimit
from rlcore_agent_loop.workers.open_conversations import Counts, OpenConversations, Sample
from rlcore_agent_loop.workers.worker import AgentWorker, Answered, Ended, PolicyRequest, UnderWay, Withdrawn, moved

if TYPE_CHECKING:
    from rlcore.contracts.rollout import Generator

logger = logging.getLogger(__name__)

MAX_BEGINS = 2
"""Attempts at a conversation: if its worker dies, it is retried once, on another worker or the replacement."""
CHECKED_TOGETHER = 512
"""Most prompts per call."""


class DistributedToolLoop(AgentLoop):
    """Deals groups to workers and turns to their conversations. The samples are the same as without workers."""

    def __init__(
        self,
        generator: "Generator",
        workers: WorkerGroup[AgentWorker],
        settings: AgentLoopSettings,
        window: int | None = None,
    ) -> None:
        self._generator, self._settings, self._window = generator, located(settings), window
        self._workers, self._dispatcher = workers, ReplicaDispatcher(workers)
        self._admission = SampleLimit(settings.max_conversations)
        self._numbers = itertools.count()
        self._counts = Counts()

    async def start(self) -> None:
        """Start tools, environment and agents in every worker, including workers that are restarted later."""
        await self._workers.each(AgentWorker.start, self._settings, self._window)
        self._workers.before_return(self._start_again)

    async def _start_again(self, worker: ReplicaHandle[AgentWorker]) -> None:
        await worker.call(AgentWorker.start, self._settings, self._window)

    async def tool_schemas(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[Mapping[str, Any]]]:
        """See `ToolLoop.tool_schemas`; from a worker, which knows the tools."""
        check_column(self._settings, prompts)
        calls = [await self._workers.replicas[0].call(AgentWorker.tool_schemas, some) for some in _calls(prompts)]
        return [schemas for found in calls for schemas in found]

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """See `ToolLoop.check`; done in a worker, which knows the tools."""
        check_column(self._settings, prompts)
        for some in _calls(prompts):
            await self._workers.replicas[0].call(AgentWorker.check, some)

    async def close(self) -> None:
        alive = [worker for worker in self._workers.replicas if worker.alive]
        await asyncio.gather(*(worker.call(AgentWorker.stop) for worker in alive))

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Every trajectory of every task, as soon as its sample ends; see `ToolLoop.rollout`.

        If a worker dies, its unfinished conversations are retried elsewhere; WorkerError if that worker dies too.
        """
        conversations = OpenConversations(self._admission)

        def begin(group: Sequence[RolloutTask]) -> None:
            for place, dealt in self._deal(group):
                conversations.spawn(self._run(conversations, place, dealt, sampling, lane))

        async with aclosing(conversations.samples(tasks, begin)) as samples:
            async for parts in samples:
                if lane is Lane.TRAIN:
                    self._counts.add(parts)
                for trajectory in parts:
                    yield trajectory

    def _deal(self, tasks: Sequence[RolloutTask]) -> list[tuple[int, list[RolloutTask]]]:
        """Assign each group to the least loaded worker. Returns pairs (worker, its groups)."""
        dealt: dict[int, list[RolloutTask]] = {}
        for task in tasks:
            dealt.setdefault(self._dispatcher.assign(task.n), []).append(task)
        return sorted(dealt.items(), key=lambda pair: pair[0])

    async def _run(
        self, conversations: OpenConversations, place: int, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane
    ) -> None:
        """Complete these groups, on this worker or another."""
        share = _Share(next(self._numbers), tasks, sampling, lane)
        for left in reversed(range(MAX_BEGINS)):
            worker = self._workers.replicas[place]
            try:
                await self._talk(conversations, share, worker, place)
                return
            except RlcoreError as error:
                if worker.alive:
                    raise
                names = ", ".join(f"{name}/{sample}" for name, sample in itertools.islice(share.missing(), 3))
                lost = f"{sum(1 for _ in share.missing())} conversations ({names})"
                if not left:
                    raise WorkerError(f"{error}; {lost} had lost a worker before, and are not begun again") from error
                logger.warning("%s; %s are begun again", error, lost)
                await self._dispatcher.wait_for_one(error)
                place = self._dispatcher.assign(sum(1 for _ in share.missing()))

    async def _talk(
        self, conversations: OpenConversations, share: "_Share", worker: ReplicaHandle[AgentWorker], place: int
    ) -> None:
        """Read one stream of a worker until every sample of the share has arrived."""
        answers: asyncio.Queue[Answered] = asyncio.Queue()
        sending = conversations.spawn(_send(worker, share.number, answers))
        tasks: dict[int, asyncio.Task[None]] = {}
        done, activity = tuple(share.done), current_activity()
        shown_as = activity.new_key()
        stream = worker.stream(AgentWorker.rollout, share.number, share.left(), share.sampling, share.lane, done)
        try:
            async with aclosing(stream) as messages:
                async for message in messages:
                    if isinstance(message, Ended):
                        share.ended(message.segments)
                        self._dispatcher.finish(place, 1)
                        conversations.deliver(message.segments)
                        if message.spans:
                            activity.end_later(partial(moved, message.spans, -activity.unix_offset))
                    elif isinstance(message, PolicyRequest):
                        tasks[message.number] = conversations.spawn(self._ask(message, share.lane, answers))
                    elif isinstance(message, Withdrawn) and message.number in tasks:
                        conversations.abandon(tasks.pop(message.number))
                    elif isinstance(message, UnderWay):
                        activity.show_elsewhere(shown_as, message.since(activity.unix_offset))
        finally:
            activity.show_elsewhere(shown_as, ())
            self._dispatcher.finish(place, sum(1 for _ in share.missing()))
            conversations.abandon(sending, *tasks.values())
            await asyncio.gather(sending, *tasks.values(), return_exceptions=True)
        if missing := sum(1 for _ in share.missing()):
            raise WorkerError(f"{worker.name}: it says it is done, but {missing} samples are missing")

    async def _ask(self, question: PolicyRequest, lane: Lane, answers: "asyncio.Queue[Answered]") -> None:
        """Pass on the policy's completions as they arrive."""
        async with aclosing(self._generator.generate(question.requests, lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                answers.put_nowait(Answered(question.number, completion))

    def metrics(self) -> Metrics:
        """See `Counts.metrics`; of the samples that ended since the last time."""
        counts, self._counts = self._counts, Counts()
        return counts.metrics()


def _calls(prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, ...]]:
    for first in range(0, len(prompts), CHECKED_TOGETHER):
        yield tuple(prompts[first : first + CHECKED_TOGETHER])


async def _send(worker: ReplicaHandle[AgentWorker], number: int, answers: "asyncio.Queue[Answered]") -> None:
    """Send all available answers to a worker at a time. Its death is reported by its stream, not here."""
    while True:
        some = [await answers.get()]
        while not answers.empty():
            some.append(answers.get_nowait())
        try:
            await worker.call(AgentWorker.answer, number, tuple(some))
        except RlcoreError:
            if worker.alive:
                raise
            return


@dataclass(eq=False)
class _Share:
    """Groups assigned to one worker, with the samples that have ended."""

    number: int
    tasks: Sequence[RolloutTask]
    sampling: Sampling
    lane: Lane
    done: set[Sample] = field(default_factory=set)

    def ended(self, parts: Sequence[Trajectory]) -> None:
        first = parts[0].id
        self.done.add((f"{first.prompt}/{first.epoch}", first.sample))

    def missing(self) -> Iterator[Sample]:
        for task in self.tasks:
            name = group_name(task)
            yield from ((name, sample) for sample in range(task.n) if (name, sample) not in self.done)

    def left(self) -> tuple[RolloutTask, ...]:
        """The groups with missing samples."""
        names = {name for name, _ in self.missing()}
        return tuple(task for task in self.tasks if group_name(task) in names)
