"""Routing of requests to replicas, and cancelled requests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import AsyncMock

import numpy as np
import pytest

from rlcore.contracts.workers import ReplicaEvent
from rlcore.errors import WorkerError
from rlcore.runtime.rollout_service import RolloutService
from rlcore.runtime.sampling_workers import Sampler
from rlcore.runtime.suspects import BLAMED_IN_A_ROW, TOGETHER
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling


class Replica:
    """Answers a sample every turn of the loop, and remembers what it was asked and whether it was stopped."""

    alive = True

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self.seconds = name, seconds
        self.calls: list[str] = []
        self.num_stopped = self.num_excused = 0

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def excuse(self) -> None:
        self.num_excused += 1

    async def stream(
        self, method: Callable[..., Any], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Completion, None]:
        """Every completion of every request."""
        self.calls += [request.id for request in requests]
        done = False
        try:
            for request in requests:
                for sample in range(request.n):
                    if self.seconds >= 0:
                        await asyncio.sleep(self.seconds)
                    yield Completion(
                        request.id, sample, np.array([1], np.int32), np.array([0.0], np.float32), FinishReason.STOP, 0
                    )
            done = True
        finally:
            self.num_stopped += not done


class Group:
    before_return: Any = None

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas: Sequence[Any] = replicas
        self.callbacks: list[Callable[[ReplicaEvent], None]] = []

    def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        self.callbacks.append(callback)

    def tell(self, kind: Literal["lost", "restored"], index: int, comes_back: bool = False) -> None:
        """Reports an event as a supervisor does."""
        self.replicas[index].alive = kind == "restored"
        for callback in self.callbacks:
            callback(ReplicaEvent(kind, index, self.replicas[index].name, "killed by signal 9", comes_back))


class Mortal(Replica):
    """Dies after `samples` samples of a call, `deaths` times, and is back `away_s` later, `restarts` times."""

    group: Group

    def __init__(self, index: int, samples: int, deaths: int, away_s: float = 0.01, restarts: int = 3) -> None:
        super().__init__(f"rollout[{index}]")
        self.index, self.samples, self.deaths, self.away_s, self.restarts = index, samples, deaths, away_s, restarts
        self.num_lost = 0

    async def stream(
        self, method: Callable[..., Any], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Completion, None]:
        if not self.alive:
            raise WorkerError(f"{self.name}.generate(): it died")
        left, life = self.samples, self.num_lost
        async with aclosing(super().stream(method, requests)) as completions:
            async for completion in completions:
                self.die_if_due(life, left)
                left -= 1
                yield completion
        self.die_if_due(life, left)

    def die_if_due(self, life: int, left: int) -> None:
        """End the call when this life has ended, which it does when no samples are left to it."""
        if self.num_lost == life and self.num_lost < self.deaths and not left:
            self.num_lost += 1
            comes_back = self.num_lost - self.num_excused <= self.restarts
            self.group.tell("lost", self.index, comes_back)
            if comes_back and self.away_s < 0:
                self.group.tell("restored", self.index)
            elif comes_back:
                asyncio.get_running_loop().call_later(self.away_s, self.group.tell, "restored", self.index)
        if self.num_lost > life:
            raise WorkerError(f"{self.name}.generate(): it died")


def mortal_service(*replicas: Mortal) -> RolloutService:
    group = Group(replicas)
    for replica in replicas:
        replica.group = group
    return RolloutService(group, deadline_s=10.0)


def service_of(*replicas: Replica) -> RolloutService:
    return RolloutService(Group(replicas), deadline_s=10.0)


def request(name: str, n: int = 1, conversation: str = "") -> GenerateRequest:
    return GenerateRequest(name, (1, 2), Sampling(), n, 0, conversation=conversation)


async def all_of(stream: AsyncIterator[Completion]) -> list[str]:
    return [completion.request_id async for completion in stream]


def test_the_requests_of_one_call_are_dealt_out_in_canonical_order() -> None:
    first, second = Replica("first"), Replica("second")
    service = service_of(first, second)
    found = asyncio.run(all_of(service.generate([request(letter) for letter in "dbca"], Lane.TRAIN)))
    assert sorted(found) == ["a", "b", "c", "d"]
    assert (first.calls, second.calls) == (["a", "c"], ["b", "d"])
    assert service.outstanding == (0, 0)


def test_single_requests_that_overlap_go_to_the_least_loaded() -> None:
    first, second = Replica("first", 0.02), Replica("second", 0.02)
    service = service_of(first, second)

    async def run() -> None:
        calls = [asyncio.create_task(all_of(service.generate([request(letter, n=2)], Lane.TRAIN))) for letter in "abcd"]
        await asyncio.sleep(0.005)
        assert service.outstanding == (4, 4)
        await asyncio.gather(*calls)

    asyncio.run(run())
    assert (first.calls, second.calls) == (["a", "c"], ["b", "d"])


def test_a_conversation_stays_where_it_was() -> None:
    first, second = Replica("first", 0.02), Replica("second")
    service = service_of(first, second)

    async def run() -> None:
        await all_of(service.generate([request("a/0", conversation="a"), request("b/0", conversation="b")], Lane.TRAIN))
        busy = asyncio.create_task(all_of(service.generate([request("other", n=5)], Lane.TRAIN)))
        await asyncio.sleep(0.005)
        assert service.outstanding == (5, 0)
        await all_of(service.generate([request("a/1", conversation="a")], Lane.TRAIN))
        await all_of(service.generate([request("b/1", conversation="b")], Lane.TRAIN))
        await busy

    asyncio.run(run())
    assert (first.calls, second.calls) == (["a/0", "other", "a/1"], ["b/0", "b/1"])


def test_a_cancelled_call_stops_its_replicas_and_leaves_nothing_pending() -> None:
    replica = Replica("only", 0.02)
    service = service_of(replica)

    async def run() -> None:
        async with aclosing(service.generate([request("a", n=9)], Lane.TRAIN)) as stream:  # type: ignore[type-var]
            async for _ in stream:
                break

    asyncio.run(run())
    assert replica.num_stopped == 1
    assert service.outstanding == (0,)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("away_s", [-1.0, 0.0, 0.01])
def test_unfinished_requests_are_asked_again_after_each_death_and_no_sample_comes_twice(
    num_replicas: int, away_s: float
) -> None:
    replicas = [Mortal(index, samples=1, deaths=3, away_s=away_s) for index in range(num_replicas)]
    service = mortal_service(*replicas)
    found = asyncio.run(all_of(service.generate([request(letter, n=3) for letter in "abcde"], Lane.TRAIN)))
    assert sorted(found) == sorted("abcde" * 3)
    assert [replica.num_lost for replica in replicas] == [3] * num_replicas
    names = [name for replica in replicas for name in replica.calls]
    assert all(names.count(letter) <= 1 + 3 * num_replicas for letter in "abcde")
    assert service.outstanding == (0,) * num_replicas


def test_samples_that_arrive_while_no_replica_serves_are_counted_once() -> None:
    replica = Mortal(0, samples=2, deaths=1)
    replica.seconds = -1.0
    service = mortal_service(replica)
    found = asyncio.run(all_of(service.generate([request("a", n=3), request("b")], Lane.TRAIN)))
    assert sorted(found) == ["a", "a", "a", "b"]
    assert service.outstanding == (0,)


def test_a_replica_that_dies_when_all_is_answered_ends_nothing() -> None:
    service = mortal_service(Mortal(0, samples=3, deaths=1, restarts=0))
    assert asyncio.run(all_of(service.generate([request("a", n=3)], Lane.TRAIN))) == ["a", "a", "a"]


def test_a_death_of_one_replica_leaves_the_work_of_another_alone() -> None:
    steady, mortal = Mortal(0, samples=1, deaths=0), Mortal(1, samples=1, deaths=2)
    service = mortal_service(steady, mortal)
    asyncio.run(all_of(service.generate([request(letter, n=3) for letter in "abcd"], Lane.TRAIN)))
    assert [steady.calls.count(letter) for letter in "ac"] == [1, 1]


def test_without_a_restart_left_the_last_death_is_named() -> None:
    replicas = [Mortal(index, samples=1, deaths=9, away_s=-1, restarts=2) for index in range(2)]
    service = mortal_service(*replicas)
    with pytest.raises(WorkerError, match=r"^rollout\[\d\]\.generate\(\): it died; rollout\[\d\]: killed by signal 9"):
        asyncio.run(all_of(service.generate([request(letter, n=3) for letter in "abcde"], Lane.TRAIN)))
    assert [replica.num_lost - replica.num_excused for replica in replicas] == [3, 3]
    assert sum(replica.num_excused for replica in replicas) <= TOGETHER + BLAMED_IN_A_ROW
    assert service.outstanding == (0, 0)


def test_an_error_of_a_replica_that_serves_is_not_retried() -> None:
    replica = Mortal(0, samples=1, deaths=0)
    service = mortal_service(replica)
    with pytest.raises(WorkerError, match="came twice, or was not asked for"):
        asyncio.run(all_of(service.generate([request("a"), request("a")], Lane.TRAIN)))
    assert replica.calls == ["a", "a"]


def test_a_deadline_names_what_is_missing() -> None:
    replica = Replica("only", 5.0)
    service = RolloutService(Group([replica]), deadline_s=0.05)
    with pytest.raises(WorkerError, match=r"1 of 1 samples are missing \(a#0\) after rollout\.deadline_s=0\.05 s"):
        asyncio.run(all_of(service.generate([request("a")], Lane.TRAIN)))
    assert service.outstanding == (0,)


def test_a_deadline_starts_again_while_samples_of_other_calls_arrive() -> None:
    """So a call may wait for its turn behind them."""
    service = RolloutService(Group([Replica("slow", 1.2), Replica("fast", 0.1)]), deadline_s=0.7)

    async def run() -> list[list[str]]:
        calls = service.generate([request("a")], Lane.TRAIN), service.generate([request("b", n=11)], Lane.TRAIN)
        return await asyncio.gather(*(all_of(call) for call in calls))

    assert asyncio.run(run()) == [["a"], ["b"] * 11]


def test_a_deadline_starts_again_with_new_weights() -> None:
    service = RolloutService(Group([Replica("only", 1.2)]), deadline_s=0.7)

    async def run() -> list[str]:
        sampler = SimpleNamespace(generator=service, lease=AsyncMock(), weights=None, check=None)
        call = asyncio.create_task(all_of(service.generate([request("a")], Lane.TRAIN)))
        await asyncio.sleep(0.6)
        await Sampler.sync_weights(sampler, 1)  # type: ignore[arg-type]
        return await call

    assert asyncio.run(run()) == ["a"]


def test_a_bug_while_a_replica_serves_is_shown_as_it_is_and_not_as_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RolloutService, "_stream", None)
    service = service_of(Replica("only"))
    with pytest.raises(
        WorkerError, match=r"rollout: a replica's requests: TypeError: 'NoneType' object is not callable"
    ):
        asyncio.run(all_of(service.generate([request("a")], Lane.TRAIN)))
    assert service.outstanding == (0,)
