"""Calls of an async reward function on the run's event loop, each a task with a deadline."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rlcore.aio import Slot, SlotQueue, Stopwatch, Timers
from rlcore.contracts.scorer import Outcome
from rlcore.errors import ChildError, PluginError, RlcoreError, boundary, describe, trace_of
from rlcore.reward.copies import private_copy
from rlcore.reward.served import ServedReward
from rlcore.reward.spec import FunctionSpec
from rlcore.reward.watchdog import LoopWatch
from rlcore.types import Lane, Trajectory

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
Scores = Sequence[float] | None
"""A group's scores for `post_process_scores` of a class; None for a scoring call."""


@dataclass
class Allowance:
    """The remaining time of a call; time in the queue does not count."""

    left_s: float


class LoopCaller:
    """An async function on the run's event loop."""

    def __init__(self, spec: FunctionSpec, watch: LoopWatch, queued: Stopwatch, concurrency: int) -> None:
        self._spec, self._watch, self._task_name = spec, watch, str(spec)
        self._seats = SlotQueue([Slot(concurrency)], queued)
        self._served = ServedReward(spec)
        self._calls: dict[asyncio.Task[list[Outcome] | ChildError], asyncio.Future[None]] = {}
        """Resolved when the call is over."""
        self._timers = Timers()

    async def start(self, start_s: float) -> None:
        """Make the function ready. PluginError after `start_s`."""
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
        """See `Caller`. The function gets private copies.

        Returns at the deadline even if the function swallows its cancellation.
        """
        place = await self._seats.take(lane is Lane.EVAL)
        loop = asyncio.get_running_loop()
        began, over = loop.time(), loop.create_future()
        task = asyncio.create_task(self._ask(trajectories, scores, over), name=self._task_name)
        self._calls[task] = over
        self._timers.set_if_it_lasts(over, began + allowance.left_s, partial(_tell, over))
        try:
            await over
        finally:
            self._timers.take_back(over)
            self._seats.give_back(place)
            allowance.left_s -= loop.time() - began
            if task.done():
                self._forget(task)
            else:
                task.add_done_callback(self._forget)
                task.cancel()
        if not task.done():
            raise TimeoutError
        return _outcomes(task)

    async def _ask(
        self, trajectories: Sequence[Trajectory], scores: Scores, over: "asyncio.Future[None]"
    ) -> list[Outcome] | ChildError:
        """Ends with the step that tells of it: a callback of the task would take another turn of the loop.

        Returns an error of the function without its cause, whose text and frames may hold much memory.
        """
        try:
            with boundary("", ChildError):
                copies = [private_copy(trajectory) for trajectory in trajectories]
                if scores is not None:
                    return await self._watch.watched(self._spec.name, self._served.post_process_here(copies, scores))
                return await self._watch.watched(self._spec.name, self._served.score_here(copies))
        except RlcoreError as error:
            cause = error.__cause__ if isinstance(error, ChildError) else None
            return ChildError(str(error).removeprefix(": "), trace_of(cause) if cause else "")
        finally:
            _tell(over)

    def _forget(self, task: "asyncio.Task[list[Outcome] | ChildError]") -> None:
        """Remove a call that nothing waits for any more."""
        del self._calls[task]
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it

    async def close(self) -> None:
        calls = list(self._calls)
        for task, over in self._calls.items():
            task.cancel()
            _tell(over)
        if calls:
            _, left = await asyncio.wait(calls, timeout=CLOSE_S)
            if left:
                logger.warning("%s: %d calls ignore that they were cancelled", self._spec, len(left))
        await self._served.close_here()


def _tell(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)


def _outcomes(task: "asyncio.Task[list[Outcome] | ChildError]") -> list[Outcome]:
    """The outcomes of a finished call; ChildError with the error that the function raised."""
    if task.cancelled():
        raise ChildError("it cancelled itself")
    error = task.exception()
    if error is None:
        found = task.result()
        if isinstance(found, ChildError):
            raise found
        return found
    raise ChildError(f"raised {describe(error)}") from error
