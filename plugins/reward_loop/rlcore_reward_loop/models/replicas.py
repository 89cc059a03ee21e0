"""The replicas of a reward model, seen from the controller: one queue, routed to the fastest replica."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from rlcore import Lane, RawScore, RewardReplica, RlcoreError, ScoreRequest, WorkerError, WorkerGroup
from rlcore.aio import Stopwatch
from rlcore.contracts.call_log import CallLog
from rlcore.errors.redaction import clipped
from rlcore_reward_loop.checks import WHERE
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.client.limits import ConcurrencyLimiter
from rlcore_reward_loop.client.router import LOG_CHARACTERS, NoTarget, Router, Target
from rlcore_reward_loop.settings import ModelSettings, health_limit_s

TRIES = 2
"""A request whose replica failed is retried on another, once. A replica that was dead before does not count."""


class Replicas:
    """An entry of `models`, started."""

    def __init__(
        self,
        name: str,
        settings: ModelSettings,
        group: WorkerGroup[RewardReplica],
        audit: CallLog,
        call_time: Stopwatch,
    ) -> None:
        """`call_time` runs while any request is in flight or waits."""
        self.name, self.settings = name, settings
        self._group, self._audit = group, audit
        self._by_name = {replica.name: replica for replica in group.replicas}
        self._call_time, self._for_slot = call_time, Stopwatch()
        self.limiter = ConcurrencyLimiter(settings.concurrency, settings.eval_slots, False, self._for_slot)
        self.router = Router(list(self._by_name), 1, settings.health_s, self._healthy)
        self.counts: dict[str, float] = defaultdict(float)
        self._failing_since: dict[str, float] = {}
        """By replica whose health checks fail: when the first of them began."""

    async def close(self) -> None:
        """Stop probing failed replicas."""
        await self.router.close()

    def take_counts(self) -> dict[str, float]:
        """num_retries of training and num_ejections since the last call; in_flight_max and ejected."""
        taken = {"num_retries": self.counts.pop("num_retries", 0.0)}
        taken["num_ejections"], self.router.num_ejections = float(self.router.num_ejections), 0
        taken["in_flight_max"], self.limiter.most_in_flight = float(self.limiter.most_in_flight), self.num_in_flight
        return taken | {"ejected": float(self.router.num_ejected)}

    def take_waits(self) -> dict[str, float]:
        """Seconds since the last call for which requests waited for more of a setting, by its key."""
        return {f"{WHERE}.models.{self.name}.replicas": self._for_slot.take()}

    @property
    def num_in_flight(self) -> int:
        """Requests in flight."""
        return sum(self.limiter.num_in_flight.values())

    async def addresses(self) -> list[str]:
        """Base URLs of the replicas that serve a chat API themselves."""
        found = await self._group.each(RewardReplica.address)
        return [address for address in found if address]

    async def ask(self, reward: str, request: ScoreRequest, lane: Lane) -> RawScore:
        """A replica's answer; NoAnswer when two replicas failed, none is healthy, or the deadline has passed."""
        self._call_time.start()
        try:
            return await self._ask_in_turn(reward, request, lane)
        finally:
            self._call_time.stop()

    async def _ask_in_turn(self, reward: str, request: ScoreRequest, lane: Lane) -> RawScore:
        async with self.limiter.slot(lane):
            began = time.monotonic()
            status, raw = "cancelled", RawScore(request.id)
            try:
                raw = await self._ask(request, began + self.settings.deadline_s, lane)
                status = raw.error or "ok"
            except NoAnswer as cause:
                status = str(cause)
                raise
            finally:
                if self._audit.wants(status):
                    self._audit.record(
                        reward=reward,
                        id=request.id,
                        target=self.name,
                        query=[dict(message) for message in request.messages],
                        response={"score": raw.score, "text": raw.text},
                        status=status,
                        lane=lane.value,
                        latency_s=round(time.monotonic() - began, 4),
                    )
        if raw.error:
            raise NoAnswer(f"model '{self.name}': {raw.error}")
        return raw

    async def _ask(self, request: ScoreRequest, due: float, lane: Lane) -> RawScore:
        reasons: list[str] = []
        avoid = None
        while len(reasons) < TRIES:
            try:
                target, number = await self.router.take(due, avoid)
            except NoTarget as cause:
                raise NoAnswer(f"model '{self.name}': no replica is healthy: {cause}") from cause
            if not self._by_name[target.name].alive:  # e.g. when its node was lost, with other replicas on it
                self.router.failed(target, number, f"{target.name} died and is not back")
                continue
            if reasons:
                self.counts["num_retries"] += lane is Lane.TRAIN
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + due - time.monotonic()):
                    found = await self._by_name[target.name].call(RewardReplica.score, [request])
                raw = _only_answer(target.name, request, found)
            except TimeoutError as cause:
                self.router.failed(target, number, "no answer in time")
                raise NoAnswer(
                    f"model '{self.name}': {target.name} gave no answer within deadline_s={self.settings.deadline_s:g}"
                ) from cause
            except RlcoreError as cause:
                self.router.failed(target, number, str(cause))
                reasons.append(f"{cause}; its class is {cause.offered_by}" if cause.offered_by else str(cause))
                avoid = target
            except asyncio.CancelledError:
                self.router.dropped(target, number)
                raise
            else:
                self.router.succeeded(target, number)
                return raw
        raise NoAnswer(f"model '{self.name}': {reasons[-1]}; the try before that: {reasons[0]}")

    async def _healthy(self, target: Target) -> bool:
        """True if it is fine. One whose processes live and whose checks fail for `deadline_s` is restarted."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(health_limit_s(self.settings)):
                await self._by_name[target.name].call(RewardReplica.health)
        except (RlcoreError, TimeoutError) as cause:
            target.last_error = str(cause) or "no sign of life"
            self._restart_if_hopeless(target, self._failing_since.setdefault(target.name, began))
            return False
        self._failing_since.pop(target.name, None)
        return True

    def _restart_if_hopeless(self, target: Target, since: float) -> None:
        replica = self._by_name[target.name]
        if not replica.alive:  # it is restarted, or has no restart left
            self._failing_since.pop(target.name, None)
            return
        failing_s, limit_s = time.monotonic() - since, self.settings.deadline_s
        if failing_s < limit_s:
            return
        del self._failing_since[target.name]
        key, problem = f"{WHERE}.models.{self.name}.deadline_s", clipped(target.last_error, LOG_CHARACTERS)
        with suppress(WorkerError):  # it has ended by now
            replica.restart(f"health checks fail for {failing_s:.0f} s, longer than {key}={limit_s:g}: {problem}")


def _only_answer(replica: str, request: ScoreRequest, found: object) -> RawScore:
    """The answer to the only request of a call; WorkerError naming the replica unless it is one answer, to this one."""
    if not isinstance(found, Sequence):
        raise WorkerError(f"{replica}.score() returned {type(found).__name__} for one request; needs [RawScore]")
    if len(found) != 1 or not isinstance(found[0], RawScore):
        kinds = ", ".join(type(answer).__name__ for answer in found[:3])
        raise WorkerError(f"{replica}.score() returned [{kinds}] for one request; needs [RawScore]")
    if found[0].id != request.id:
        answered = clipped(str(found[0].id), 100)
        raise WorkerError(f"{replica}.score() answered request '{answered}'; needs '{request.id}', the request's id")
    return found[0]
