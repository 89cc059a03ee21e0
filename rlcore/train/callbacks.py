"""Callbacks after each step: they watch a run and can end it, but cannot change its computations."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rlcore.aio import in_daemon_thread
from rlcore.errors import ConfigError, RlcoreError, boundary, place_of, trace_of
from rlcore.types import FrozenDict, Metrics

logger = logging.getLogger(__name__)

OnStep = Callable[[int, Metrics], object]
"""Called with a step and a copy of its metrics; the result is ignored."""
StopWhen = Callable[[int, Metrics], object]
"""Called in the same way; the run ends cleanly after a step with a true result."""


@dataclass(frozen=True)
class Callbacks:
    """The functions that a caller of `rlcore.train` passed."""

    on_step: OnStep | None = None
    """An exception is logged as a warning and disables it, so a failing plot does not end the run."""
    stop_when: StopWhen | None = None
    """An exception ends the run after a checkpoint, because only this function knows when to stop."""

    def __post_init__(self) -> None:
        for name in ("on_step", "stop_when"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise ConfigError(f"{name}: found {getattr(self, name)!r}; needs a function of (step, metrics)")


class StepCallbacks:
    """Calls them after each step, one at a time, in a thread: the step waits, and the event loop keeps running."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._on_step = callbacks.on_step

    async def after_step(self, step: int, metrics: Metrics) -> bool:
        """True if the run is to end. ConfigError when `stop_when` raised."""
        seen = FrozenDict(metrics)
        if self._on_step is not None:
            try:
                await _in_thread("on_step", self._on_step, step, seen)
            except RlcoreError as error:
                self._on_step = None
                logger.info("%s", trace_of(error))
                logger.warning("%s; it is not called again, training continues", error)
        if self._callbacks.stop_when is None:
            return False
        return bool(await _in_thread("stop_when", self._callbacks.stop_when, step, seen))


async def _in_thread(name: str, function: Callable[[int, Metrics], object], step: int, metrics: Metrics) -> object:
    """The function's result; ConfigError, with the line, for what it raises."""

    def call() -> object:
        try:
            with boundary(name, ConfigError, BaseException):
                return function(step, metrics)
        except RlcoreError as error:
            raise ConfigError(f"{error}{place_of(error.__cause__ or error)}") from error.__cause__

    return await in_daemon_thread(f"{name} of step {step}", call)
