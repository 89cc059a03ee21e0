"""Calls of a plain reward function in killable children."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from rlcore.config import RewardFunctionConfig
from rlcore.contracts.workers import Child, Children
from rlcore.errors import ChildError, PluginError, RlcoreError, WorkerError
from rlcore.reward.loop_calls import Allowance, Scores
from rlcore.reward.outcome import Outcome
from rlcore.reward.seats import Slot, SlotQueue, Stopwatch
from rlcore.reward.spec import FunctionSpec
from rlcore.types import Lane, Trajectory

SERVED = "rlcore.reward.served:serve_in_child"


class Caller(Protocol):
    """Runs one call."""

    async def call(
        self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance, scores: Scores = None
    ) -> list[Outcome]:
        """An outcome for each trajectory; with `scores`, what `post_process_scores` makes of them.

        Raises TimeoutError at the end of the allowance, ChildError when the function raised, WorkerError when its
        process died.
        """
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class ChildCaller:
    """A sync function in killable children."""

    def __init__(self, spec: FunctionSpec, children: Children, config: RewardFunctionConfig, queued: Stopwatch):
        self._spec, self._children, self._config = spec, children, config
        self._threads = config.threads if config.isolation == "threads" else 1
        self._seats = SlotQueue([Slot(self._threads) for _ in range(config.children)], queued)
        self.num_restarts = 0
        self._closed = False

    async def start_first(self) -> Child:
        """The first child, in which the function can be inspected; PluginError or ConfigError if it is no good."""
        return await self._renew(self._seats.places[0])

    async def start_others(self) -> None:
        """Make the other children ready."""
        await all_or_none([self._renew(place) for place in self._seats.places[1:]])

    async def call(
        self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance, scores: Scores = None
    ) -> list[Outcome]:
        """See `Caller`. A call that was merely in the same child as a bad one is made once more."""
        try:
            return await self._call(trajectories, lane, allowance, scores)
        except WorkerError:
            if self._threads == 1:
                raise
        return await self._call(trajectories, lane, allowance, scores)

    async def _call(
        self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance, scores: Scores
    ) -> list[Outcome]:
        place = await self._seats.take(lane)
        try:
            child = await self._living(place)
            began = time.monotonic()
            asked: tuple[Any, ...] = (
                ("score", trajectories) if scores is None else ("post_process", trajectories, scores)
            )
            try:
                outcomes: list[Outcome] = await child.call(*asked, deadline_s=allowance.left_s)
            except WorkerError as cause:
                hint = self._limit_of_memory() if "killed by signal" in str(cause) else ""
                raise WorkerError(f"{cause}{hint}") from cause  # an innocent call's allowance stays
            except (TimeoutError, ChildError) as cause:
                allowance.left_s -= time.monotonic() - began
                if is_out_of_memory(cause) and self._config.memory_gib:
                    await child.close()  # what the function still holds would fail the next call, too
                    raise ChildError(f"{cause}{self._limit_of_memory()}") from cause
                raise
            allowance.left_s -= time.monotonic() - began
            return outcomes
        finally:
            self._seats.give_back(place)

    def _limit_of_memory(self) -> str:
        limit = self._config.memory_gib
        return f"; it may hold reward.functions.{self._spec.name}.memory_gib={limit:g}" if limit else ""

    async def _living(self, place: Slot) -> Child:
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

    async def _renew(self, place: Slot) -> Child:
        if place.child is not None:
            await place.child.close()
        place.child = await start_child(self._spec, self._children, self._config, self._threads)
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


async def start_child(spec: FunctionSpec, children: Children, config: RewardFunctionConfig, threads: int) -> Child:
    """A child in which the function is ready. What its own code did wrong is a PluginError, also that it hangs."""
    key, limit = f"reward.functions.{spec.name}", config.memory_gib
    name = f"reward {spec.name}"
    try:
        return await children.start(
            SERVED, spec, limit, name=name, threads=threads, deadline_s=config.start_s, env=config.env
        )
    except (ChildError, PluginError) as cause:
        whole = str(cause) if isinstance(cause, PluginError) else f"{spec}: {cause}"
        if limit and is_out_of_memory(cause):
            whole += f"; {key}.memory_gib={limit:g} is less than importing it needs"
        raise PluginError(whole) from cause
    except WorkerError as cause:
        hint = f"; {key}.memory_gib={limit:g} may be less than importing it needs" if limit else ""
        raise PluginError(
            f"{spec}: {cause}; {key}.start_s={config.start_s:g} is for importing it and its setup{hint}"
        ) from cause


def is_out_of_memory(cause: BaseException) -> bool:
    """Whether this is a MemoryError of a child, or of numpy, which has its own."""
    return "MemoryError" in str(cause)
