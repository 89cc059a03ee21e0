"""The conversations of one rollout: admitted group by group, delivered as they end. None outlives the rollout."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from typing import Any

from rlcore.aio import Inbox
from rlcore.contracts.agents import RolloutTask
from rlcore.errors import WorkerError
from rlcore.types import Metrics, Trajectory
from rlcore_agent_loop.conversation.turn_sampler import group_name
from rlcore_agent_loop.workers.admission import SampleLimit

Sample = tuple[str, int]
"""A group's name and the number of one of its samples."""


class OpenConversations:
    """The tasks of one rollout."""

    def __init__(self, admission: SampleLimit) -> None:
        self._ended: Inbox[Sequence[Trajectory]] = Inbox()
        self._num_pending = 0
        """Places taken and not yet returned."""
        self._admission = admission
        self._tasks: set[asyncio.Task[None]] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        """Tasks cancelled because they are not needed any more."""

    async def samples(
        self,
        tasks: Sequence[RolloutTask],
        begin: Callable[[Sequence[RolloutTask]], None],
        done: Collection[Sample] = (),
    ) -> AsyncGenerator[Sequence[Trajectory], None]:
        """The parts of each sample as soon as it ends, except for `done` samples.

        `begin` gets groups in order, as many at a time as there is room for. The first error of anything spawned ends
        the stream.
        """
        names = [group_name(task) for task in tasks]
        if len(set(names)) != len(names):
            raise WorkerError("agent loop: a pair of prompt and epoch occurs twice in one call; each must occur once")
        counts = Counter(name for name, _ in done)
        waiting = [(task, task.n - counts[name]) for task, name in zip(tasks, names, strict=True)]
        self.spawn(self._admit(waiting, begin))
        left = sum(num for _, num in waiting)
        try:
            while left:
                parts = await self._ended.take()
                left -= 1
                yield parts
        finally:
            await self._close()

    async def _admit(
        self, waiting: list[tuple[RolloutTask, int]], begin: Callable[[Sequence[RolloutTask]], None]
    ) -> None:
        while waiting:
            await self._admission.take(waiting[0][1])
            group = [waiting.pop(0)]
            while waiting and self._admission.take_now(waiting[0][1]):
                group.append(waiting.pop(0))
            self._num_pending += sum(num for _, num in group)
            begin([task for task, _ in group])

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run in the background; an error ends the rollout."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def begin(self, run: Callable[[], Coroutine[Any, Any, Sequence[Trajectory]]]) -> None:
        """Run a sample and deliver it."""
        self._tasks.add(asyncio.create_task(self._deliver(run)))

    async def _deliver(self, run: Callable[[], Coroutine[Any, Any, Sequence[Trajectory]]]) -> None:
        """Forgets its own task unless it fails: a done callback would cost an iteration of the loop per sample."""
        task = asyncio.current_task()
        try:
            parts = await run()
            if task is not None:
                self._tasks.discard(task)
        finally:
            if task is not None and task in self._tasks:
                task.add_done_callback(self._done)
        self.deliver(parts)

    def deliver(self, parts: Sequence[Trajectory]) -> None:
        """Deliver a sample that has ended."""
        self._ended.put(parts)
        self._num_pending -= 1
        self._admission.give_back(1)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task in self._abandoned:
            self._abandoned.discard(task)
        elif task.cancelled():
            self._ended.fail(WorkerError("agent loop: a conversation was cancelled by something that it awaited"))
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ended.fail(error)

    def abandon(self, *tasks: "asyncio.Task[None]") -> None:
        """Cancel spawned tasks that are not needed any more."""
        for task in tasks:
            if not task.done():
                self._abandoned.add(task)
                task.cancel()

    async def _close(self) -> None:
        """Cancel and await what still runs, and return its places."""
        tasks = [task for task in self._tasks if not task.done()]  # few are left after a normal step
        self.abandon(*tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        num_pending, self._num_pending = self._num_pending, 0
        if num_pending:
            self._admission.give_back(num_pending)


class Counts:
    """Statistics of samples that have ended."""

    def __init__(self) -> None:
        self._samples = self._parts = self._turns = self._calls = self._errors = 0
        self._ended: Counter[str] = Counter()

    def add(self, parts: Sequence[Trajectory]) -> None:
        """Count a sample that has ended."""
        info = parts[-1].info
        self._samples += 1
        self._parts += len(parts)
        self._turns += sum(part.turns for part in parts)
        self._calls += info.get("num_calls", 0)
        self._errors += info.get("num_call_errors", 0)
        self._ended[str(info["ended_by"])] += 1

    def metrics(self) -> Metrics:
        """Means over the samples, agent/turns_mean, agent/parts_mean and agent/ended/<why>_frac;
        agent/num_new_parts (parts begun after the first), agent/num_tool_calls and agent/num_tool_errors."""
        found = {
            "agent/turns_mean": self._turns / max(1, self._samples),
            "agent/parts_mean": self._parts / max(1, self._samples),
            "agent/num_new_parts": float(self._parts - self._samples),
            "agent/num_tool_calls": float(self._calls),
            "agent/num_tool_errors": float(self._errors),
        }
        return found | {f"agent/ended/{why}_frac": n / self._samples for why, n in sorted(self._ended.items())}
