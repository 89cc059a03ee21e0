"""Serves a reward function where it runs: loads it by name, calls it in its style, checks its results.

Sync functions are served in a child process, async ones on the run's loop. This module imports only what a child may
import.
"""

import inspect
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlcore.contracts.scorer import Outcome, shown
from rlcore.errors import ANSWERED, PluginError, RewardError, boundary
from rlcore.imports import import_target
from rlcore.reward.call_arguments import column_arguments, group_arguments, log_arguments, no_columns, score_arguments
from rlcore.reward.memory_limit import limit_memory
from rlcore.reward.notes import CallNotes
from rlcore.reward.outcome import outcome_of_one, outcome_of_score, outcomes_of_many
from rlcore.reward.raised import import_failure, raise_with_line
from rlcore.reward.signature import ACCEPTED, Style, check_hooks, is_factory, logs, read_signature, with_settings
from rlcore.reward.spec import FunctionSpec, received
from rlcore.types import Trajectory

logger = logging.getLogger(__name__)


def _load(spec: FunctionSpec) -> Any:
    """The object that the target names; PluginError naming the target's provider."""
    try:
        return import_target(spec.target)
    except PluginError as error:
        raise PluginError(f"reward function '{spec.name}': {error}") from error
    except ANSWERED as cause:
        raise PluginError(f"{spec}: importing it failed: {import_failure(cause)}") from cause


def serve_in_child(spec: FunctionSpec, memory_gib: float) -> "ServedReward":
    """The function in a separate child process with that memory limit (0: none)."""
    if memory_gib:
        limit_memory(spec.name, memory_gib)
    return ServedReward(spec)


class ServedReward:
    """One loaded function. In a child, making the object also makes the function ready."""

    def __init__(self, spec: FunctionSpec) -> None:
        self.spec = spec
        with boundary(str(spec), PluginError):
            target = _load(spec)
        who = f"reward function '{spec.name}'"
        self._own: dict[str, Any] = with_settings(who, target, spec.kwargs, received(spec.settings))
        is_made = is_factory(target, self._own)
        if is_made:
            target, self._own = self._made(target), {}
        self.signature = read_signature(spec.name, target, self._own, spec.scope, is_made)
        if self.signature.method:
            check_hooks(who, target, self.signature, spec.scope)
        self._target, self._call = target, target
        self._object: Any = None
        self._log_failed = False
        if not self.signature.is_async:
            self._construct()
            self._refuse_async("post_process_scores", "log")
            pending = self._life_cycle("setup")
            if inspect.isawaitable(pending):
                raise PluginError(f"{spec}: setup is async and score is not; make both one kind")

    def kind(self) -> tuple[bool, bool]:
        """True if it is async, and so runs on the run's loop, and whether it looks at a group's scores afterwards.

        Nothing of an async function has been set up then.
        """
        has_more = bool(self.signature.method) and hasattr(self._target, "post_process_scores")
        return self.signature.is_async, has_more

    def score(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """An outcome for each trajectory, from one call. ChildError with the line where the function raised."""
        args, kwargs, notes = self._arguments(trajectories)
        began = time.monotonic()
        try:
            value = self._call(*args, **kwargs)
        except ANSWERED as cause:
            raise_with_line(cause, trajectories)
        latency_s = time.monotonic() - began
        outcomes = self._outcomes(value, trajectories, notes)
        if not logs(self._object, self.signature):
            return outcomes
        try:
            with boundary("log", RewardError):
                self._object.log(**log_arguments(self._object.log, trajectories[0], outcomes[0], latency_s))
        except RewardError as error:
            return self._unlogged(outcomes, error)
        return outcomes

    def post_process(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[Outcome]:
        """The group's outcomes after the class post-processed its scores."""
        call = self._object.post_process_scores
        named = group_arguments(call, trajectories, self.spec)
        try:
            value = call(list(scores), **named)
        except ANSWERED as cause:
            raise_with_line(cause, trajectories)
        return outcomes_of_many(value, [0] * len(trajectories), may_skip=False)

    async def setup_here(self) -> None:
        """Set up an async function."""
        self._construct()
        pending = self._life_cycle("setup")
        if inspect.isawaitable(pending):
            with boundary(f"{self.spec}: setup", PluginError):
                await pending

    async def score_here(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """`score` of an async function."""
        args, kwargs, notes = self._arguments(trajectories)
        began = time.monotonic()
        try:
            value = await self._call(*args, **kwargs)
        except ANSWERED as cause:
            raise_with_line(cause, trajectories)
        latency_s = time.monotonic() - began
        outcomes = self._outcomes(value, trajectories, notes)
        if not logs(self._object, self.signature):
            return outcomes
        try:
            with boundary("log", RewardError):
                pending = self._object.log(**log_arguments(self._object.log, trajectories[0], outcomes[0], latency_s))
                if inspect.isawaitable(pending):
                    await pending
        except RewardError as error:
            return self._unlogged(outcomes, error)
        return outcomes

    async def post_process_here(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[Outcome]:
        """`post_process` of an async function."""
        call = self._object.post_process_scores
        named = group_arguments(call, trajectories, self.spec)
        try:
            value = call(list(scores), **named)
            if inspect.isawaitable(value):
                value = await value
        except ANSWERED as cause:
            raise_with_line(cause, trajectories)
        return outcomes_of_many(value, [0] * len(trajectories), may_skip=False)

    async def close_here(self) -> None:
        """`close` of an async function."""
        pending = self._life_cycle("close")
        if inspect.isawaitable(pending):
            with boundary(f"{self.spec}: close", PluginError):
                await pending

    def close(self) -> None:
        """Release the resources of a class."""
        self._life_cycle("close")

    def _made(self, factory: Any) -> Any:
        """The function that the factory returned; PluginError unless it can be called."""
        called = f"{factory.__name__}({', '.join(f'{key}=...' for key in self._own)})"  # their values may be secrets
        if inspect.iscoroutinefunction(factory):
            raise PluginError(
                f"{self.spec}: is async and takes nothing of a sample; what returns the reward function must be plain"
            )
        with boundary(f"{self.spec}: the call {called}", PluginError):
            made = factory(**self._own)
        if callable(made):
            return made
        raise PluginError(
            f"{self.spec}: takes nothing of a sample, so it was called to return the reward function, and {called} "
            f"returned {shown(made)}; {ACCEPTED}"
        )

    def _construct(self) -> None:
        if self.signature.method:
            with boundary(f"{self.spec}: its constructor", PluginError):
                self._object = self._target(**self._own)
            self._call = getattr(self._object, self.signature.method)

    def _refuse_async(self, *methods: str) -> None:
        for method in methods:
            counts = method != "log" or logs(self._object, self.signature)
            if counts and inspect.iscoroutinefunction(getattr(self._object, method, None)):
                raise PluginError(
                    f"{self.spec}: {method} is async and {self.signature.method} is not; make both one kind"
                )

    def _life_cycle(self, method: str) -> Any:
        call = getattr(self._object, method, None)
        if not callable(call):
            return None
        with boundary(f"{self.spec}: {method}", PluginError):
            return call()

    def _arguments(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[tuple[Any, ...], dict[str, Any], CallNotes | None]:
        own = {} if self.signature.method else self._own
        if self.signature.style is Style.TRAJECTORY:
            return (trajectories[0],), own, None
        if self.signature.style is Style.TRAJECTORIES:
            return (list(trajectories),), own, None
        if self.signature.style is Style.COMPUTE_SCORE:
            named = score_arguments(trajectories[0])
            return (), {key: value for key, value in named.items() if key in self.signature.names} | own, None
        named = column_arguments(trajectories, self.spec)
        notes = CallNotes(len(trajectories))
        named |= {"log_extra": notes.log_extra, "log_metric": notes.log_metric}
        missing = sorted(self.signature.required - named.keys() - own.keys())
        if missing:
            raise RewardError(no_columns(missing, named, trajectories))
        return (), {key: value for key, value in named.items() if self.signature.takes(key)} | own, notes

    def _outcomes(self, value: Any, trajectories: Sequence[Trajectory], notes: CallNotes | None) -> list[Outcome]:
        lengths = [len(trajectory.token_ids) for trajectory in trajectories]
        if self.signature.takes_many:
            outcomes = outcomes_of_many(value, lengths)
            return outcomes if notes is None else notes.on(outcomes)
        if self.signature.style is Style.COMPUTE_SCORE:
            return [outcome_of_score(value, lengths[0])]
        return [outcome_of_one(value, lengths[0], may_skip=False)]

    def _unlogged(self, outcomes: Sequence[Outcome], error: RewardError) -> list[Outcome]:
        """A failing `log` does not affect scores: it is logged once, and noted in each sample's info."""
        if not self._log_failed:
            self._log_failed = True
            logger.warning("%s: %s; scores stand", self.spec, error)
        return [replace(outcome, info={**outcome.info, "log_error": str(error)}) for outcome in outcomes]
