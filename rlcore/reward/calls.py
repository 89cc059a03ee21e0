"""Calls of one reward function: where they run, how long they may take, and what becomes of a failed one."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from rlcore.config import RewardFunctionConfig
from rlcore.errors import ChildError, PluginError, RlcoreError, WorkerError
from rlcore.reward.loop_calls import Allowance, BegunCall, LoopCaller
from rlcore.reward.outcome import Outcome, failed
from rlcore.reward.seats import Place, Seats, Stopwatch
from rlcore.reward.served import FunctionSpec
from rlcore.reward.watchdog import LoopWatch
from rlcore.types import Lane, RewardStatus, Trajectory
from rlcore.workers import Child, Children

logger = logging.getLogger(__name__)

SERVED = "rlcore.reward.served:ServedReward"
PRELOAD_S = 120.0
"""How long importing and setting up a function may take, outside of any call's deadline."""
FIRST_RETRY_S = 0.1
LOGGED_TRACES = 3
JITTER = random.Random()
"""A generator of its own: how long a retry waits must not move anybody else's random numbers."""


class Caller(Protocol):
    """Runs one call."""

    async def call(self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance) -> list[Outcome]:
        """An outcome for each trajectory.

        Raises TimeoutError at the end of the allowance, ChildError when the function raised, WorkerError when its
        process died.
        """
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class ChildCaller:
    """A sync function in killable children."""

    def __init__(self, spec: FunctionSpec, children: Children, num_children: int, threads: int, queued: Stopwatch):
        self._spec, self._children, self._threads = spec, children, threads
        self._seats = Seats([Place(threads) for _ in range(num_children)], queued)
        self.num_restarts = 0
        self._closed = False

    async def start_first(self) -> Child:
        """The first child, in which the function can be inspected; PluginError or ConfigError if it is no good."""
        return await self._renew(self._seats.places[0])

    async def start_others(self) -> None:
        """Make the other children ready."""
        await all_or_none([self._renew(place) for place in self._seats.places[1:]])

    async def call(self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance) -> list[Outcome]:
        """See `Caller`. A call that was merely in the same child as a bad one is made once more."""
        try:
            return await self._call(trajectories, lane, allowance)
        except WorkerError:
            if self._threads == 1:
                raise
        return await self._call(trajectories, lane, allowance)

    async def _call(self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance) -> list[Outcome]:
        place = await self._seats.take(lane)
        try:
            child = await self._living(place)
            began = time.monotonic()
            try:
                outcomes: list[Outcome] = await child.call("score", trajectories, deadline_s=allowance.left_s)
            except WorkerError:
                raise  # the child died: an innocent call gets its whole allowance again
            except (TimeoutError, ChildError):
                allowance.left_s -= time.monotonic() - began
                raise
            allowance.left_s -= time.monotonic() - began
            return outcomes
        finally:
            self._seats.give_back(place)

    async def _living(self, place: Place) -> Child:
        async with place.renewal:
            if self._closed:
                raise WorkerError(f"{self._spec}: was called after it was closed")
            if place.child is not None and place.child.alive:
                return place.child
            self.num_restarts += 1
            try:
                return await self._renew(place)
            except RlcoreError as cause:
                raise WorkerError(f"its process ended and cannot be started again: {cause}") from cause

    async def _renew(self, place: Place) -> Child:
        if place.child is not None:
            await place.child.close()
        place.child = await start_child(self._spec, self._children, self._threads)
        return place.child

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(place.child.close() for place in self._seats.places if place.child is not None))


async def all_or_none(starts: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Wait for all; when one fails, cancel the others, wait until they have ended, and raise its error as it is."""
    tasks = [asyncio.create_task(each) for each in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def start_child(spec: FunctionSpec, children: Children, threads: int) -> Child:
    """A child in which the function is ready; what the function's own code did wrong is a PluginError."""
    try:
        return await children.start(SERVED, spec, name=f"reward {spec.name}", threads=threads, deadline_s=PRELOAD_S)
    except ChildError as cause:
        raise PluginError(f"{spec}: {cause}") from cause


class FunctionCalls:
    """A configured function: its calls, with deadline and retries, always end in outcomes."""

    def __init__(self, spec: FunctionSpec, config: RewardFunctionConfig, weight: float, deadline_s: float) -> None:
        self.spec, self.config, self.weight, self.deadline_s = spec, config, weight, deadline_s
        self._caller: Caller | None = None
        self._num_traces = 0

    @property
    def name(self) -> str:
        """The function's name in `reward.functions`."""
        return self.spec.name

    @property
    def scope(self) -> str:
        """How many samples a call sees."""
        return self.spec.scope

    @property
    def on_failure(self) -> str:
        """Empty: `reward.functions` says it."""
        return ""

    @property
    def post_processes(self) -> bool:
        """A function that looks at a group has the scope of one."""
        return False

    @property
    def is_async(self) -> bool:
        """Whether it runs on the run's loop; known after `start`."""
        return isinstance(self._caller, LoopCaller)

    @property
    def num_restarts(self) -> int:
        """Children that had to be replaced so far."""
        return getattr(self._caller, "num_restarts", 0)

    async def start(self, children: Children, watch: LoopWatch, queued: Stopwatch) -> None:
        """Look at the function in a child, and get ready where it belongs: there, or on this loop."""
        threads = self.config.threads if self.config.isolation == "threads" else 1
        in_children = ChildCaller(self.spec, children, self.config.children, threads, queued)
        self._caller = in_children
        first = await in_children.start_first()
        if not await first.call("is_async", deadline_s=PRELOAD_S):
            await in_children.start_others()
            return
        await in_children.close()
        on_loop = LoopCaller(self.spec, watch, queued, self.config.concurrency)
        self._caller = on_loop
        await on_loop.start()

    async def close(self) -> None:
        """Let go of everything; also when `start` failed."""
        if self._caller is not None:
            await self._caller.close()

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        """An outcome for each trajectory; tried again, under on_failure=retry, while the deadline allows."""
        allowance = Allowance(self.deadline_s)
        tries = self.config.tries if self.config.on_failure == "retry" else 1
        pause = FIRST_RETRY_S
        while True:
            tries -= 1
            outcomes = await self._try(trajectories, lane, allowance)
            good = all(each.status is not RewardStatus.FAILED for each in outcomes)
            wait = pause * JITTER.uniform(0.5, 1.5)
            if good or tries <= 0 or allowance.left_s <= wait:
                return outcomes
            await asyncio.sleep(wait)
            allowance.left_s -= wait
            pause *= 2

    async def post_process(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane
    ) -> list[Outcome]:
        """The outcomes as they are."""
        return list(outcomes)

    async def _try(self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance) -> list[Outcome]:
        if self._caller is None:
            raise WorkerError(f"{self.spec}: was called before it was started")
        try:
            return await self._caller.call(trajectories, lane, allowance)
        except (TimeoutError, ChildError, WorkerError) as cause:
            return [self._failed(cause, allowance)] * len(trajectories)

    def begin(self, trajectory: Trajectory, told: "Callable[[BegunCall, Outcome], None]") -> BegunCall | None:
        """`score` of one sample without a task that waits: `told` is told its outcome, unless the call is stopped.

        None, and nothing was begun, where only `score` will do: in children, with further tries, and when it queues.
        """
        if not isinstance(self._caller, LoopCaller) or self.config.on_failure == "retry":
            return None
        return self._caller.begin([trajectory], Allowance(self.deadline_s), partial(self._ended, told))

    def _ended(self, told: "Callable[[BegunCall, Outcome], None]", call: BegunCall) -> None:
        try:
            [outcome] = call.outcomes()
        except (TimeoutError, ChildError) as cause:
            outcome = self._failed(cause, call.allowance)
        told(call, outcome)

    def _failed(self, cause: TimeoutError | ChildError | WorkerError, allowance: Allowance) -> Outcome:
        if isinstance(cause, TimeoutError):
            allowance.left_s = 0.0
            return failed(f"no result within {self.deadline_s:g} s")
        if isinstance(cause, ChildError):
            self._log(cause.trace)
        return failed(str(cause))

    def _log(self, trace: str) -> None:
        if trace and self._num_traces < LOGGED_TRACES:
            self._num_traces += 1
            logger.warning("%s raised:\n%s", self.spec, trace)
