"""Routes each call to the target expected to answer first, and avoids those that do not answer."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rlcore.aio import Dispatcher
from rlcore.errors.redaction import clipped

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0
"""Longest pause of an ejected target, in multiples of its first."""
LONGEST_REST_S = 60.0
"""Most seconds for which a target is left alone because it asked to be."""
MEMORY = 0.2
"""Weight of the newest call in a target's running means."""
LOG_CHARACTERS = 500
"""Most characters of an error in the log."""
LOG_PAUSE_S = 60.0
"""Seconds between lines in the log about a target, which may fail and return many times a second."""


class NoTarget(Exception):
    """No target will be available in time; the message says why."""


@dataclass(eq=False)
class Target:
    """One address or replica."""

    name: str
    calls: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By call in flight: when it began, and how many were in flight then, itself included."""
    latency_s: float = 0.0
    """Running mean over answered calls; 0: none yet."""
    company: float = 1.0
    """Running mean of the calls that were in flight with an answered one, itself included."""
    num_failures: int = 0
    """In a row."""
    witnesses: set[object] = field(default_factory=set)
    """Callers of these calls."""
    last_error: str = ""
    ejected_until: float | None = None
    """Time at which it may be tried again; None while it is in use."""
    num_ejections: int = 0
    """Since it last answered."""
    trial: int | None = None
    """The call that tests whether it is back; until it ends, no other call may use the target."""
    log_time: float = float("-inf")
    """Time of the last line in the log about this target."""
    rests_until: float = 0.0
    """Time until which it asked to be left alone; it is used if the others rest as well."""

    def expected_s(self, now: float, guess_s: float) -> float:
        """Estimated seconds until a call that begins now is answered.

        The mean latency, scaled by how much more is in flight than was then (a target that serves calls in parallel
        keeps its latency, one that serves them in turn does not), or the age of its oldest call if that is more. A
        target that has not answered yet is assumed to need `guess_s`, or the age of its oldest call, per call in
        flight. So a target that has just come back gets a few calls, not all of them.
        """
        oldest_s = now - next(iter(self.calls.values()))[0] if self.calls else 0.0
        if self.latency_s == 0.0:
            return max(oldest_s, guess_s) * (len(self.calls) + 1)
        return max(self.latency_s * max(1.0, (len(self.calls) + 1) / self.company), oldest_s)


class Router:
    """Chooses among targets; `eject_after` failures in a row take one out of use.

    With `probe`, an ejected target is probed until it succeeds. Without it, one real call tests the target; then an
    ejection needs failures from several callers, because a single caller may be the cause, and the last target in
    use is never ejected.
    """

    def __init__(
        self,
        names: Sequence[str],
        eject_after: int,
        pause_s: float,
        probe: Callable[[Target], Awaitable[bool]] | None = None,
    ) -> None:
        self.targets = tuple(Target(name) for name in names)
        self.num_ejections = 0
        self._eject_after, self._pause_s, self._probe = eject_after, pause_s, probe
        self._dispatcher = Dispatcher(self.targets, self._usable)
        self._numbers = iter(range(1 << 62))
        self._probing: dict[Target, asyncio.Task[None]] = {}

    @property
    def num_ejected(self) -> int:
        """Targets out of use now."""
        return sum(target.ejected_until is not None for target in self.targets)

    def take_now(self, avoid: Target | None = None) -> tuple[Target, int] | None:
        """A target (not `avoid` if there is another) and the number of the call that begins; None: all are ejected."""
        now = time.monotonic()
        known = [
            target
            for target in self.targets
            if target.latency_s and target.ejected_until is None and target is not avoid
        ]
        guess_s = min((target.latency_s for target in known), default=0.0)
        target = self._dispatcher.choose(
            lambda candidate: (
                candidate.rests_until > now,
                candidate.expected_s(now, guess_s),
                len(candidate.calls),
            ),
            avoid,
        )
        return None if target is None else self._begin(target, now)

    async def take(self, due: float, avoid: Target | None = None) -> tuple[Target, int]:
        """`take_now`, after a wait while all are ejected; NoTarget if none is back before `due` (monotonic)."""
        while True:
            if taken := self.take_now(avoid):
                return taken
            limit_s = due - time.monotonic()
            if limit_s <= 0:
                errors = ", ".join(f"{target.name}: {target.last_error}" for target in self.targets)
                raise NoTarget(f"out of use until it answers again ({errors})")
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._dispatcher.change()

    def succeeded(self, target: Target, call: int) -> None:
        """Record that the call was answered."""
        began, company = target.calls.pop(call)
        took = time.monotonic() - began
        first = target.latency_s == 0.0
        target.latency_s = took if first else (1 - MEMORY) * target.latency_s + MEMORY * took
        target.company = float(company) if first else (1 - MEMORY) * target.company + MEMORY * company
        self._readmit(target)

    def refused(self, target: Target, call: int) -> None:
        """Record that the call was answered without doing its work: that says nothing about how long work takes."""
        target.calls.pop(call)
        self._readmit(target)

    def has_other(self, target: Target) -> bool:
        """True if another target is in use and has not asked to be left alone."""
        now = time.monotonic()
        others = [other for other in self.targets if other is not target]
        return any(other.ejected_until is None and other.rests_until <= now for other in others)

    def failed(self, target: Target, call: int, error: str, witness: object = None, retry_after_s: float = 0.0) -> None:
        """Record that the call of `witness` was not answered; the target asked to be left alone for `retry_after_s`."""
        target.calls.pop(call)
        target.rests_until = time.monotonic() + min(retry_after_s, LONGEST_REST_S)
        target.num_failures += 1
        target.witnesses.add(witness)
        target.last_error = error
        is_trial = call == target.trial
        if not is_trial and not self._proven(target):
            return
        pause_s = self._pause_s * min(LONGEST_PAUSE, 2.0**target.num_ejections)
        if target.ejected_until is None or is_trial:
            self.num_ejections += 1
            target.num_ejections += 1
            target.ejected_until = time.monotonic() + pause_s
            target.trial = None
            self._tell(target)
            self._dispatcher.notify()
        if self._probe is not None and target not in self._probing:
            self._probing[target] = asyncio.create_task(self._until_back(target), name=f"health of {target.name}")

    def _proven(self, target: Target) -> bool:
        if target.num_failures < self._eject_after:
            return False
        others = any(other.ejected_until is None for other in self.targets if other is not target)
        return self._probe is not None or (others and len(target.witnesses) > 1)

    def _tell(self, target: Target) -> None:
        """Say in the log that a target is left alone, and why."""
        if (now := time.monotonic()) >= target.log_time + LOG_PAUSE_S:
            target.log_time = now
            in_use, problem = len(self.targets) - self.num_ejected, clipped(target.last_error, LOG_CHARACTERS)
            logger.warning("%s is left alone (%s); %d of %d in use", target.name, problem, in_use, len(self.targets))

    def dropped(self, target: Target, call: int) -> None:
        """Record that the caller has left: the call says nothing about the target."""
        target.calls.pop(call, None)
        if call == target.trial:
            target.trial = None
        self._dispatcher.notify()

    async def close(self) -> None:
        """End the probes."""
        for task in self._probing.values():
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        self._probing.clear()

    def _usable(self, target: Target) -> bool:
        if target.ejected_until is None:
            return True
        return self._probe is None and time.monotonic() >= target.ejected_until and target.trial is None

    def _begin(self, target: Target, now: float) -> tuple[Target, int]:
        call = next(self._numbers)
        if target.ejected_until is not None:
            target.trial = call
        target.calls[call] = (now, len(target.calls) + 1)
        return target, call

    def _readmit(self, target: Target) -> None:
        target.num_failures = target.num_ejections = 0
        target.witnesses.clear()
        if target.ejected_until is not None:
            target.ejected_until = target.trial = None
            self._dispatcher.notify()

    async def _until_back(self, target: Target) -> None:
        try:
            while self._probe is not None:
                await asyncio.sleep(self._pause_s)
                if await self._probe(target):
                    self._readmit(target)
                    return
        finally:
            self._probing.pop(target, None)
