"""Routing of requests to replicas, and cancelled requests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from rlcore.errors import WorkerError
from rlcore.runtime.rollout_service import RolloutService
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling


class Replica:
    """Answers a sample every turn of the loop, and remembers what it was asked and whether it was stopped."""

    alive = True

    def __init__(self, name: str, seconds: float = 0.0) -> None:
        self.name, self.seconds = name, seconds
        self.asked: list[str] = []
        self.num_stopped = 0

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(
        self, method: Callable[..., Any], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Completion, None]:
        """Every completion of every request."""
        self.asked += [request.id for request in requests]
        done = False
        try:
            for request in requests:
                for sample in range(request.n):
                    await asyncio.sleep(self.seconds)
                    yield Completion(
                        request.id, sample, np.array([1], np.int32), np.array([0.0], np.float32), FinishReason.STOP, 0
                    )
            done = True
        finally:
            self.num_stopped += not done


class Group:
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas: Sequence[Any] = replicas

    def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def on_event(self, callback: Any) -> None:
        """Nothing dies here."""


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
    assert (first.asked, second.asked) == (["a", "c"], ["b", "d"])
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
    assert (first.asked, second.asked) == (["a", "c"], ["b", "d"])


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
    assert (first.asked, second.asked) == (["a/0", "other", "a/1"], ["b/0", "b/1"])


def test_a_call_that_is_given_up_stops_its_replicas_and_owes_nothing() -> None:
    replica = Replica("only", 0.02)
    service = service_of(replica)

    async def run() -> None:
        async with aclosing(service.generate([request("a", n=9)], Lane.TRAIN)) as stream:  # type: ignore[type-var]
            async for _ in stream:
                break

    asyncio.run(run())
    assert replica.num_stopped == 1
    assert service.outstanding == (0,)


def test_a_deadline_names_what_is_missing() -> None:
    replica = Replica("only", 5.0)
    service = RolloutService(Group([replica]), deadline_s=0.05)
    with pytest.raises(WorkerError, match=r"1 of 1 samples are missing \(a#0\) after rollout\.deadline_s=0\.05 s"):
        asyncio.run(all_of(service.generate([request("a")], Lane.TRAIN)))
    assert service.outstanding == (0,)
