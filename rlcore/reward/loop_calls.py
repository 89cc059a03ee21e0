"""Calls of an async reward function on the run's event loop, each a task with a deadline."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.aio import Slot, SlotQueue, Stopwatch
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
    """The rest of a call's deadline; time in the queue does not count."""

    left_s: float


class LoopCaller:
    """An async function on the run's event loop."""

    def __init__(self, spec: FunctionSpec, watch: LoopWatch, queued: Stopwatch, concurrency: int) -> None:
        self._spec, self._watch, self._task_name = spec, watch, str(spec)
        self._seats = SlotQueue([Slot(concurrency)], queued)
        self._served = ServedReward(spec)
        self._tasks: set[asyncio.Task[list[Outcome]]] = set()

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
        """See `Caller`. The function gets copies: its changes stay its own.

        Returns at the deadline also when the function swallows its cancellation.
        """
        place = await self._seats.take(lane is Lane.EVAL)
        began = time.monotonic()
        task = asyncio.create_task(self._ask(trajectories, scores), name=self._task_name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            done, _ = await asyncio.wait({task}, timeout=allowance.left_s)
        finally:
            task.cancel()
            self._seats.give_back(place)
            allowance.left_s -= time.monotonic() - began
        if not done:
            raise TimeoutError
        return _outcomes(task)

    async def _ask(self, trajectories: Sequence[Trajectory], scores: Scores) -> list[Outcome]:
        with boundary("", ChildError):
            copies = [private_copy(trajectory) for trajectory in trajectories]
            if scores is not None:
                return await self._watch.watched(self._spec.name, self._served.post_process_here(copies, scores))
            return await self._watch.watched(self._spec.name, self._served.score_here(copies))

    def _forget(self, task: "asyncio.Task[list[Outcome]]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs that of a call whose time was up

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=CLOSE_S)
            if left:
                logger.warning("%s: %d calls ignore that they were cancelled", self._spec, len(left))
        await self._served.close_here()


def _outcomes(task: "asyncio.Task[list[Outcome]]") -> list[Outcome]:
    """The outcomes of a finished call; ChildError with the error that the function raised."""
    if task.cancelled():
        raise ChildError("it cancelled itself")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, RlcoreError):
        cause = error.__cause__ if isinstance(error, ChildError) else None
        raise ChildError(describe(cause) if cause else str(error)) from error
    raise ChildError(f"raised {describe(error)}") from error
