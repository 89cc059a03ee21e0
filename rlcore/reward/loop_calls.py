"""Calls of an async reward function on the run's event loop: most end at once, and those that wait have a deadline."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rlcore.aio import SharedTasks, Slot, SlotQueue, Stopwatch, Timers
from rlcore.contracts.scorer import Outcome
from rlcore.errors import ChildError, PluginError, RlcoreError, boundary, describe
from rlcore.reward.copies import private_copy
from rlcore.reward.served import ServedReward
from rlcore.reward.spec import FunctionSpec
from rlcore.reward.watchdog import LoopWatch
from rlcore.types import Lane, Trajectory

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
Scores = Sequence[float] | None
"""Of a group, for `post_process_scores` of a class; None for a call that scores."""


@dataclass
class Allowance:
    """What is left of a call's deadline; time in the queue is not charged."""

    left_s: float


class LoopCaller:
    """An async function on the run's event loop."""

    def __init__(self, spec: FunctionSpec, watch: LoopWatch, queued: Stopwatch, concurrency: int) -> None:
        self._spec, self._watch, self._task_name = spec, watch, str(spec)
        self._seats = SlotQueue([Slot(concurrency)], queued)
        self._served = ServedReward(spec)
        self._tasks: set[asyncio.Task[None]] = set()
        self._shared = SharedTasks(self._spawn)
        self._timers = Timers()

    async def start(self, start_s: float) -> None:
        """Make the function ready. PluginError when that takes longer."""
        self._watch.start()
        try:
            async with asyncio.timeout(start_s):
                await self._watch.watched(self._spec.name, self._served.setup_here())
        except TimeoutError as cause:
            raise PluginError(
                f"{self._spec}: setup has not ended within {start_s:g} s; put its cause right, or raise "
                f"reward.functions.{self._spec.name}.start_s"
            ) from cause

    async def call(
        self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance, scores: Scores = None
    ) -> list[Outcome]:
        """See `Caller`. The function gets copies: what it changes, nobody else sees."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def told(_: BegunCall) -> None:
            if not over.done():
                over.set_result(None)

        call = self._begin(trajectories, await self._seats.take(lane is Lane.EVAL), allowance, told, scores)
        try:
            await over
        finally:
            call.stop()
        return call.outcomes()

    def begin(
        self, trajectories: Sequence[Trajectory], allowance: Allowance, told: "Callable[[BegunCall], None]"
    ) -> "BegunCall | None":
        """`call` without a task that waits, whose end `told` is told of; None when it would have to queue."""
        place = self._seats.take_now()
        return None if place is None else self._begin(trajectories, place, allowance, told)

    def _begin(
        self,
        trajectories: Sequence[Trajectory],
        place: Slot,
        allowance: Allowance,
        told: "Callable[[BegunCall], None]",
        scores: Scores = None,
    ) -> "BegunCall":
        call = BegunCall(self, place, allowance, told)
        self._shared.begin(call.run(trajectories, scores))
        self._timers.set_if_it_lasts(call, call.due, call.end)
        return call

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=self._task_name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def ask(self, trajectories: Sequence[Trajectory], scores: Scores) -> Awaitable[list[Outcome]]:
        """What the function says of copies: what it changes, nobody else sees."""
        copies = [private_copy(each) for each in trajectories]
        if scores is not None:
            return self._watch.watched(self._spec.name, self._served.post_process_here(copies, scores))
        return self._watch.watched(self._spec.name, self._served.score_here(copies))

    def let_go(self, call: "BegunCall", place: Slot) -> None:
        """Nobody waits for it any more."""
        self._timers.take_back(call)
        self._seats.give_back(place)

    async def close(self) -> None:
        self._shared.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            if left:
                logger.warning("%s: %d calls ignore that they were cancelled", self._spec, len(left))
        await self._served.close_here()


class BegunCall:
    """A call of an async function under way; whoever began it is told once, of its end or that its time is up.

    Nothing ever waits for what the function does after its time: one that swallows the cancellation must not hold up
    the run.
    """

    def __init__(
        self, caller: LoopCaller, place: Slot, allowance: Allowance, told: "Callable[[BegunCall], None]"
    ) -> None:
        self.allowance = allowance
        self._caller, self._place, self._told = caller, place, told
        self._began = asyncio.get_running_loop().time()
        self._task: asyncio.Task[Any] | None = None
        self._outcomes: list[Outcome] | None = None
        self._error: BaseException | None = None
        self.over = False
        """Nobody waits for it any more."""

    @property
    def due(self) -> float:
        """When its time is up, on the loop's clock."""
        return self._began + self.allowance.left_s

    async def run(self, trajectories: Sequence[Trajectory], scores: Scores = None) -> None:
        """Ask the function; in a task that is this call's alone from when it waits for something."""
        if self.over:
            return
        self._task = task = asyncio.current_task()
        with self, boundary("", ChildError):
            outcomes = await self._caller.ask(trajectories, scores)
            if task is not None and task.cancelling() and not self.over:
                raise asyncio.CancelledError  # by itself: whoever has the task after it is not to suffer for that
            self._outcomes = outcomes

    def __enter__(self) -> None:
        """The function is asked."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """What the function raised is told with the outcome."""
        self._error, self._task = error, None
        self.end()
        return isinstance(error, RlcoreError)

    def end(self) -> None:
        """It has ended, or its time is up."""
        if not self.over:
            self.stop()
            self._told(self)

    def stop(self) -> None:
        """Let go of it; nobody is told any more."""
        if self.over:
            return
        self.over = True
        self.allowance.left_s -= asyncio.get_running_loop().time() - self._began
        self._caller.let_go(self, self._place)
        if self._task is not None:
            self._task.cancel()

    def outcomes(self) -> list[Outcome]:
        """What it came to; see `Caller.call` for what it raises."""
        error, self._error = self._error, None  # whose frames hold this call
        if isinstance(error, asyncio.CancelledError):
            raise ChildError("it cancelled itself")
        if isinstance(error, RlcoreError):
            cause = error.__cause__ if isinstance(error, ChildError) else None
            raise ChildError(describe(cause) if cause else str(error)) from error
        if error is not None:  # none may pass: somebody waits for an outcome
            raise ChildError(f"raised {describe(error)}") from error
        if self._outcomes is None:
            raise TimeoutError
        return self._outcomes
