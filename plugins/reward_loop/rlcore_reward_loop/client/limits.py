"""Limits concurrent calls: slots that grow and shrink with the service, two lanes, and an even pace."""

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rlcore import Lane
from rlcore.aio import Stopwatch

LANES = (Lane.EVAL, Lane.TRAIN)
"""First come, first served."""
REST_S = 0.5
"""Seconds between two halvings of the concurrency: calls already in flight carry no new information."""
BURST_S = 0.05
"""Seconds a rate may run ahead of even spacing: less than one call at up to 20 calls per second."""


MOST_CREDIT_S = 60.0


class ConcurrencyLimiter:
    """Slots for `concurrency` calls, and `eval_slots` more that only evaluation may take.

    With `adaptive`, `overloaded` halves the concurrency and every success raises it by 1 / concurrency (AIMD), between
    1 and what was configured; the reserved slots shrink in proportion, to no less than 1.

    It counts calls. `rlcore.aio.SlotQueue` hands out distinct slots, one call each, and reserves none.
    """

    def __init__(self, concurrency: int, eval_slots: int, adaptive: bool, queued: Stopwatch) -> None:
        self.limit = self.least_limit = float(concurrency)
        self.num_in_flight = dict.fromkeys(Lane, 0)
        self.most_in_flight = 0
        self._concurrency, self._eval_slots, self._adaptive, self._queued = concurrency, eval_slots, adaptive, queued
        self._waiting: dict[Lane, deque[asyncio.Future[None]]] = {lane: deque() for lane in Lane}
        self._halved_at = -REST_S

    @asynccontextmanager
    async def slot(self, lane: Lane) -> AsyncIterator[None]:
        """A slot, held until the block ends."""
        if not self.enter(lane):
            await self.wait(lane)
        try:
            yield
        finally:
            self.leave(lane)

    def enter(self, lane: Lane) -> bool:
        """Take a slot if one is free and the queue is empty. The caller must call `leave`."""
        if self._waiting[lane] or not self._may(lane):
            return False
        self._begin(lane)
        return True

    def overloaded(self) -> None:
        """Record that the service reported overload."""
        now = time.monotonic()
        if self._adaptive and now - self._halved_at >= REST_S:
            self._halved_at = now
            self.limit = max(1.0, self.limit / 2)
            self.least_limit = min(self.least_limit, self.limit)

    def served(self) -> None:
        """Record that the service answered."""
        if self._adaptive and self.limit < self._concurrency:
            self.limit = min(float(self._concurrency), self.limit + 1.0 / self.limit)
            self._admit()

    def _may(self, lane: Lane) -> bool:
        evaluating, training = self.num_in_flight[Lane.EVAL], self.num_in_flight[Lane.TRAIN]
        if evaluating == 0:
            return lane is Lane.EVAL or training < int(self.limit)
        reserved = max(1, int(self._eval_slots * self.limit / self._concurrency))
        if lane is Lane.EVAL and evaluating < reserved:
            return True
        return training + max(0, evaluating - reserved) < int(self.limit)

    async def wait(self, lane: Lane) -> None:
        """Take a slot when it is this call's turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(turn)
        self._queued.start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(lane)
            raise
        finally:
            self._queued.stop()

    def leave(self, lane: Lane) -> None:
        """Give a slot back."""
        self.num_in_flight[lane] -= 1
        self._admit()

    def _begin(self, lane: Lane) -> None:
        self.num_in_flight[lane] += 1
        in_flight = self.num_in_flight[Lane.TRAIN] + self.num_in_flight[Lane.EVAL]
        if in_flight > self.most_in_flight:
            self.most_in_flight = in_flight

    def _admit(self) -> None:
        for lane in LANES:
            waiting = self._waiting[lane]
            while waiting and (waiting[0].done() or self._may(lane)):
                turn = waiting.popleft()
                if not turn.done():
                    self._begin(lane)
                    turn.set_result(None)


class RateLimiter:
    """Admits at most `per_minute` units per minute, evenly spaced; the units of a turn may be corrected later.

    In any second, at most per_minute / 60 + 1 turns of one unit begin; above 20 per second, up to 5 % more. Units that
    a turn reserved and did not use are credited to the calls that wait.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60.0
        self._clock = clock
        self._free_at = 0.0
        """Time at which the units admitted so far would have been spread evenly."""
        self._credit_s = 0.0
        """Seconds credited by corrections while calls wait."""

    def wait_s(self) -> float:
        """Seconds until the next turn may begin."""
        if not self._per_s:
            return 0.0
        ahead_s = max(BURST_S, 1.0 / self._per_s) - 1.0 / self._per_s
        return max(0.0, self._free_at - ahead_s - self._clock())

    def begin(self, units: float = 1.0) -> None:
        """Begin a turn."""
        if self._per_s:
            self._free_at = max(self._free_at, self._clock())
            self._pay(units / self._per_s)

    def correct(self, units: float) -> None:
        """Correct a turn that was `units` larger (smaller, if negative) than estimated."""
        if not self._per_s:
            return
        if units > 0:
            self._pay(units / self._per_s)
            return
        now = self._clock()
        ahead_s = max(0.0, self._free_at - now) + units / self._per_s
        self._free_at = now + max(0.0, ahead_s)
        self._credit_s = min(MOST_CREDIT_S, self._credit_s + max(0.0, -ahead_s))

    def forget_credit(self) -> None:
        """Drop the credit: the queue is empty, so no call has lost time."""
        self._credit_s = 0.0

    def _pay(self, seconds: float) -> None:
        paid_s = min(self._credit_s, seconds)
        self._credit_s -= paid_s
        self._free_at += seconds - paid_s


class FairQueue:
    """A queue for a request rate and a token rate, in which evaluation goes first.

    `for_requests` and `for_tokens` measure how long calls wait for each rate: at a time, for the one that lasts longer.
    """

    def __init__(self, requests: RateLimiter, tokens: RateLimiter) -> None:
        self._requests, self._tokens = requests, tokens
        self.for_requests, self.for_tokens = Stopwatch(), Stopwatch()
        self._running: Stopwatch | None = None
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, int, float, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def now(self, tokens: float) -> bool:
        """Begin a call of this many tokens if it need not wait."""
        if self._waiting or self._wait_s():
            return False
        self._begin(tokens)
        return True

    async def turn(self, lane: Lane, tokens: float) -> float:
        """Wait until a call of this many tokens may begin. Returns the seconds waited."""
        if self.now(tokens):
            return 0.0
        began = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (lane is not Lane.EVAL, next(self._numbers), tokens, turn))
        self._pump()
        await turn
        return time.monotonic() - began

    def correct(self, tokens: float) -> None:
        """Correct a call that took `tokens` more than estimated; if negative, waiting calls begin sooner."""
        self._tokens.correct(tokens)
        self._pump()

    def close(self) -> None:
        """Admit no more calls."""
        self._stop_timer()
        self._watch(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self, running: Stopwatch | None) -> None:
        before, self._running = self._running, running
        if before is running:
            return
        if before is not None:
            before.stop()
        if running is not None:
            running.start()

    def _wait_s(self) -> float:
        return max(self._requests.wait_s(), self._tokens.wait_s())

    def _begin(self, tokens: float) -> None:
        self._requests.begin()
        self._tokens.begin(tokens)

    def _pump(self) -> None:
        self._stop_timer()
        while self._waiting:
            _, _, tokens, turn = self._waiting[0]
            if turn.done():
                heapq.heappop(self._waiting)
                continue
            wait_s = self._wait_s()
            if wait_s > 0:
                later = self._tokens.wait_s() > self._requests.wait_s()
                self._watch(self.for_tokens if later else self.for_requests)
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._pump)
                return
            heapq.heappop(self._waiting)
            self._begin(tokens)
            turn.set_result(None)
        self._watch(None)
        self._tokens.forget_credit()
