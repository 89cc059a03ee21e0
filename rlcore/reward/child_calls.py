"""Calls of a plain reward function in killable children."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from rlcore.aio import Stopwatch
from rlcore.config import RewardFunctionConfig
from rlcore.contracts.children import Child, ChildPool, Children, ChildSlot
from rlcore.contracts.scorer import Outcome
from rlcore.errors import ChildError, PluginError, WorkerError, boundary, shown
from rlcore.reward.checked_scorer import problem_of
from rlcore.reward.loop_calls import Allowance, Scores
from rlcore.reward.spec import FunctionSpec
from rlcore.types import Lane, Trajectory

SERVED = "rlcore.reward.served:serve_in_child"


class Caller(Protocol):
    """Runs one call."""

    async def call(
        self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance, scores: Scores = None
    ) -> list[Outcome]:
        """An outcome for each trajectory; with `scores`, the results of `post_process_scores`.

        Raises TimeoutError at the end of the allowance, ChildError when the function raised, WorkerError when its
        process died.
        """
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


class ChildCaller:
    """A sync function in killable children."""

    def __init__(self, spec: FunctionSpec, children: Children, config: RewardFunctionConfig, queued: Stopwatch):
        self._spec, self._config = spec, config
        self._threads = config.threads if config.isolation == "threads" else 1

        async def start(index: int) -> Child:
            return await start_child(spec, children, config, self._threads)

        self._pool = ChildPool(start, config.children, self._threads, queued)

    @property
    def num_restarts(self) -> int:
        """Children that had to be replaced so far."""
        return self._pool.num_restarts

    async def start_first(self) -> Child:
        """The first child, in which the function can be inspected; PluginError or ConfigError if it is unusable."""
        return await self._pool.first()

    async def start_others(self) -> None:
        """Make the other children ready."""
        await self._pool.start()

    async def call(
        self, trajectories: Sequence[Trajectory], lane: Lane, allowance: Allowance, scores: Scores = None
    ) -> list[Outcome]:
        """See `Caller`. A call that failed only because it shared a child with a bad one is retried once."""
        message: tuple[Any, ...] = ("score", trajectories) if scores is None else ("post_process", trajectories, scores)
        try:
            return await self._call(message, lane, allowance)
        except WorkerError:
            if self._threads == 1:
                raise
        return await self._call(message, lane, allowance)

    async def _call(self, message: tuple[Any, ...], lane: Lane, allowance: Allowance) -> list[Outcome]:
        began: list[tuple[float, ChildSlot]] = []
        try:
            outcomes = await self._pool.call(
                *message,
                who=str(self._spec),
                deadline_s=allowance.left_s,
                lane=lane,
                began=lambda slot: began.append((time.monotonic(), slot)),
            )
        except WorkerError as cause:
            hint = self._limit_of_memory() if "killed by signal" in str(cause) else ""
            raise WorkerError(f"{cause}{hint}") from cause  # an innocent call's allowance stays
        except (TimeoutError, ChildError) as cause:
            [(at, slot)] = began
            allowance.left_s -= time.monotonic() - at
            if is_out_of_memory(cause) and self._config.memory_gib:
                if slot.child is not None:
                    await slot.child.close()  # memory that the function keeps would fail the next call, too
                raise ChildError(f"{cause}{self._limit_of_memory()}") from cause
            raise
        allowance.left_s -= time.monotonic() - began[0][0]
        return self._checked(outcomes, message[1])

    def _checked(self, outcomes: Any, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """ChildError for anything but an outcome per sample, because user code may have written it."""
        if type(outcomes) is not list or len(outcomes) != len(trajectories):
            needed = f"needs {len(trajectories)} outcomes"
            raise ChildError(f"{self._spec}: its process answered {shown(outcomes)}; {needed}")
        with boundary(f"{self._spec}: what its process answered", ChildError):
            for trajectory, outcome in zip(trajectories, outcomes, strict=True):
                if problem := problem_of(outcome, trajectory):
                    raise ChildError(f"{self._spec}: its process answered {problem}, for {trajectory.id}")
        return outcomes

    def _limit_of_memory(self) -> str:
        limit = self._config.memory_gib
        return f"; it may hold reward.functions.{self._spec.name}.memory_gib={limit:g}" if limit else ""

    async def close(self) -> None:
        await self._pool.close()


async def start_child(spec: FunctionSpec, children: Children, config: RewardFunctionConfig, threads: int) -> Child:
    """A child in which the function is ready. Errors and hangs of the function's code are PluginErrors."""
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
    """True if this is a MemoryError of a child, or of numpy, which has its own."""
    return "MemoryError" in str(cause)
