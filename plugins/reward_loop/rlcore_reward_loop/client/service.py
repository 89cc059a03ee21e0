"""A service: its calls are bounded in time, tries, concurrency and rate, over all rewards that use it."""

import asyncio
import hashlib
import json
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from rlcore import Lane
from rlcore.aio import Stopwatch, Timers
from rlcore.contracts.call_log import CallLog
from rlcore_reward_loop.checks import WHERE
from rlcore_reward_loop.client.http import ENCODER, Client, NoAnswer, Unavailable, WrongAddress, plain
from rlcore_reward_loop.client.limits import ConcurrencyLimiter, FairQueue, RateLimiter
from rlcore_reward_loop.client.router import NoTarget, Router
from rlcore_reward_loop.settings import ServiceSettings

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
CHARACTERS_PER_TOKEN = 4.0
MOST_SHARED = 3
"""After this many identical calls have failed, a call asks for itself, so that they do not fail one by one."""
JITTER = random.Random()
"""A separate generator: pauses must not change other random numbers."""


def any_answer(answer: Any) -> bool:
    """True: the caller decides later whether an answer is of use."""
    return True


@dataclass(frozen=True)
class Call:
    """One question."""

    reward: str
    """The component of the reward that asks."""
    id: str
    """The sample in question."""
    body: Mapping[str, Any]
    path: str = ""
    """Appended to the service's address."""
    answer_tokens: int = 0
    """Most tokens of the answer, for the rate."""
    with_ids: bool = False
    """Body and answer contain ids, which are ignored when two calls are compared, and not kept."""
    readable: Callable[[Any], bool] = any_answer
    """False for an answer that fails a sample: it is neither kept nor given to identical calls."""


@dataclass(eq=False)
class _Asking:
    """A call that identical ones wait for."""

    answer: "asyncio.Future[Any]"
    """Cancelled if no answer can be shared."""
    begun: bool = False
    """True once it has a slot and a turn."""


class Service:
    """An entry of `services`, started."""

    def __init__(self, name: str, settings: ServiceSettings, audit: CallLog, call_time: Stopwatch):
        """`call_time` runs while any call is in flight or waits."""
        self.name, self.settings, self.audit = name, settings, audit
        self._call_time, self._for_slot = call_time, Stopwatch()
        self.client = Client(settings.token)
        self.timers = Timers()
        self.limiter = ConcurrencyLimiter(settings.concurrency, settings.eval_slots, settings.adaptive, self._for_slot)
        self.queue = FairQueue(RateLimiter(settings.requests_per_minute), RateLimiter(settings.tokens_per_minute))
        self.router = Router(settings.urls, settings.eject_after, settings.eject_s)
        self._cache: OrderedDict[bytes, Any] = OrderedDict()
        self._in_flight: dict[tuple[bytes, Lane], _Asking] = {}
        self.counts: dict[str, float] = defaultdict(float)

    async def start(self) -> None:
        """Prepare to connect."""
        await self.client.start()

    async def close(self) -> None:
        """Admit no more calls."""
        self.queue.close()
        await self.router.close()
        await self.client.close()

    def take_counts(self) -> dict[str, float]:
        """Training's num_retries and num_cache_hits, and num_ejections, since the last call; in_flight_max, ejected."""
        limiter, counts = self.limiter, self.counts
        taken = {name: counts.pop(name, 0.0) for name in ("num_retries", "num_cache_hits")}
        taken["num_ejections"], self.router.num_ejections = float(self.router.num_ejections), 0
        taken["in_flight_max"], limiter.most_in_flight = (
            float(limiter.most_in_flight),
            sum(limiter.num_in_flight.values()),
        )
        return taken | {"ejected": float(self.router.num_ejected), "concurrency": float(int(limiter.limit))}

    def take_waits(self) -> dict[str, float]:
        """Seconds since the last call for which calls waited for more of a setting, by its key.

        A call that waits for the rate blocks its slot, and that time counts for the rate alone. Slots that overload has
        taken away do not count: the service cannot take more, and needs further addresses.
        """
        where = f"{WHERE}.services.{self.name}"
        rate = {
            "requests_per_minute": self.queue.for_requests.take(),
            "tokens_per_minute": self.queue.for_tokens.take(),
        }
        slots = "concurrency" if int(self.limiter.least_limit) >= self.settings.concurrency else "urls"
        self.limiter.least_limit = self.limiter.limit
        waits = {**rate, slots: max(0.0, self._for_slot.take() - sum(rate.values()))}
        return {f"{where}.{setting}": seconds for setting, seconds in waits.items()}

    @property
    def num_in_flight(self) -> int:
        """Calls in flight."""
        return sum(self.limiter.num_in_flight.values())

    def ask(self, call: Call, lane: Lane) -> Coroutine[Any, Any, Any]:
        """The service's answer, parsed; NoAnswer when the tries are used up or the deadline has passed.

        The deadline counts from when the call has a slot and its turn, so a long queue fails no call.
        """
        return self._ask_once(call, lane) if self.settings.cache else self._ask(call, lane)

    async def _ask_once(self, call: Call, lane: Lane) -> Any:
        """The answer to an identical call, if there was one."""
        key = _key(call)
        for _ in range(MOST_SHARED):
            if key in self._cache and call.readable(self._cache[key]):
                self.counts["num_cache_hits"] += lane is Lane.TRAIN
                self._cache.move_to_end(key)
                return self._cache[key]
            if (same := self._identical(key, lane)) is None:
                break
            await asyncio.wait([same])
            if not same.cancelled() and call.readable(same.result()):
                self.counts["num_cache_hits"] += lane is Lane.TRAIN
                return same.result()
            # The first caller has left or failed. Failures are not shared, so the next caller asks.
        asking = _Asking(asyncio.get_running_loop().create_future())
        self._in_flight.setdefault((key, lane), asking)
        try:
            answer = await self._ask(call, lane, asking)
            if call.readable(answer):
                self._cache[key] = shared = _without_ids(call, answer)
                asking.answer.set_result(shared)
        finally:
            asking.answer.cancel()
            if self._in_flight.get((key, lane)) is asking:
                del self._in_flight[key, lane]
        while len(self._cache) > self.settings.cache:
            self._cache.popitem(last=False)
        return answer

    def _identical(self, key: bytes, lane: Lane) -> "asyncio.Future[Any] | None":
        """The answer of an identical call worth waiting for; an evaluation does not wait for a queued training call."""
        for of in Lane:
            found = self._in_flight.get((key, of))
            if found is not None and (found.begun or lane in (of, Lane.TRAIN)):
                return found.answer
        return None

    async def _ask(self, call: Call, lane: Lane, asking: "_Asking | None" = None) -> Any:
        body = ENCODER.encode(call.body).encode()
        self._call_time.start()
        try:
            if not self.limiter.enter(lane):
                await self.limiter.wait(lane)
            try:
                return await _Tries(self, call, body, lane, asking).answer()
            finally:
                self.limiter.leave(lane)
        finally:
            self._call_time.stop()


def _key(call: Call) -> bytes:
    questions = call.body.get("samples", [call.body]) if call.with_ids else [call.body]
    left_out = ("id",) if call.with_ids else ()
    identity = [{key: value for key, value in question.items() if key not in left_out} for question in questions]
    text = json.dumps([call.path, identity], default=plain, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def _without_ids(call: Call, answer: Any) -> Any:
    """A readable answer without the ids of the samples that it was asked about."""
    if not call.with_ids:
        return answer
    if "samples" not in call.body:
        return _without_id(answer)
    return {**answer, "scores": [_without_id(judged) for judged in answer["scores"]]}


def _without_id(judged: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in judged.items() if key != "id"}


class _Tries:
    """The tries of one call."""

    def __init__(self, service: Service, call: Call, body: bytes, lane: Lane, asking: _Asking | None) -> None:
        self.service, self.call, self.body, self.lane, self.asking = service, call, body, lane, asking
        self.settings = service.settings
        self.tokens = len(body) / CHARACTERS_PER_TOKEN + call.answer_tokens
        self.last = ""
        self.where = ""
        self.content = b""
        self.tried = 0

    async def answer(self) -> Any:
        """The answer; NoAnswer naming the address, the deadline or the tries. Both go into the audit log."""
        began = time.monotonic()
        status = "ok"
        try:
            return await self._try_until(began + self.settings.deadline_s)
        except NoAnswer as cause:
            status = str(cause)
            raise
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        finally:
            if self.service.audit.wants(status):
                self.service.audit.record(
                    reward=self.call.reward,
                    id=self.call.id,
                    target=self.where or self.service.name,
                    query=self.body,
                    response=self.content,
                    status=status,
                    tries=self.tried,
                    lane=self.lane.value,
                    latency_s=round(time.monotonic() - began, 4),
                )

    async def _try_until(self, due: float) -> Any:
        service, avoid = self.service, None
        while True:
            if not service.queue.now(self.tokens):
                due += await service.queue.turn(self.lane, self.tokens)
            if self.asking is not None:
                self.asking.begun = True
            try:
                target, number = service.router.take_now(avoid) or await service.router.take(due, avoid)
            except NoTarget as cause:
                raise self._no_answer(str(cause)) from cause
            self.where = target.name
            self.tried += 1
            try:
                with service.timers.within(due - time.monotonic()):
                    answer, self.content = await service.client.post(
                        target.name + self.call.path, self.body, self.settings.max_response_bytes
                    )
            except TimeoutError:
                service.router.failed(target, number, "no answer in time", self.call.id)
                service.limiter.overloaded()
                raise self._no_answer(f"no answer within {self._deadline}") from None
            except Unavailable as cause:
                if cause.overloaded:
                    service.limiter.overloaded()
                service.router.failed(target, number, str(cause), self.call.id, cause.retry_after_s or 0.0)
                self.last, avoid = str(cause), target
                await self._pause(due, None if service.router.has_other(target) else cause.retry_after_s)
            except WrongAddress as cause:
                service.router.failed(target, number, str(cause), self.call.id)
                if not service.router.has_other(target):
                    raise self._no_answer(str(cause)) from cause
                self.last, avoid = str(cause), target
                await self._pause(due, None)
            except NoAnswer as cause:
                service.router.refused(target, number)
                raise self._no_answer(str(cause)) from cause
            except asyncio.CancelledError:
                service.router.dropped(target, number)
                raise
            else:
                if len(service.router.targets) == 1 or self.call.readable(answer):
                    service.router.succeeded(target, number)
                else:
                    service.router.failed(target, number, "answered, and not with what is needed", self.call.id)
                service.limiter.served()
                self._count_tokens(answer)
                return answer

    async def _pause(self, due: float, retry_after_s: float | None) -> None:
        """Wait before the next try; NoAnswer when there will be none."""
        if self.tried >= self.settings.tries:
            last, self.last = self.last, ""
            raise self._no_answer(f"{last} in the last of {self.settings.tries} tries")
        wait_s = pause_s(self.tried, retry_after_s)
        if time.monotonic() + wait_s >= due:
            raise self._no_answer(f"no answer within {self._deadline}: the next try is {wait_s:.1f} s away")
        self.service.counts["num_retries"] += self.lane is Lane.TRAIN
        await asyncio.sleep(wait_s)

    @property
    def _deadline(self) -> str:
        return f"plugins.reward_loop.services.{self.service.name}.deadline_s={self.settings.deadline_s:g}"

    def _no_answer(self, why: str) -> NoAnswer:
        also = f", before which it {self.last}" if self.last else ""
        return NoAnswer(f"service '{self.service.name}' ({self.where or 'no address'}): {why}{also}")

    def _count_tokens(self, answer: Any) -> None:
        usage = answer.get("usage") if isinstance(answer, dict) else None
        total = usage.get("total_tokens") if isinstance(usage, dict) else None
        if isinstance(total, (int, float)) and 0 <= total < 1e9:
            self.service.queue.correct(total - self.tokens)


def pause_s(tried: int, retry_after_s: float | None) -> float:
    """Seconds until the next try: Retry-After and up to 10 % more, else exponential backoff with jitter."""
    if retry_after_s is not None:
        return retry_after_s * JITTER.uniform(1.0, 1.1)
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (tried - 1)) * JITTER.uniform(0.5, 1.0))
