"""A request that kills its replica fails as data; the others are served, and replicas keep their restarts."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal

import numpy as np
import pytest

from rlcore.contracts.workers import ReplicaEvent
from rlcore.errors import WorkerError
from rlcore.runtime import suspects
from rlcore.runtime.rollout_service import RolloutService
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling

LETTERS = "abcdefghijklmnop"


class Replica:
    """Dies while it serves one of `poisons`, or at each of the first `deaths` calls; back `restarts` times."""

    before_return: Any = None

    def __init__(self, index: int, poisons: str = "", deaths: int = 0, restarts: int = 3) -> None:
        self.index, self.name, self.poisons, self.left = index, f"rollout[{index}]", poisons, deaths
        self.alive = True
        self.restarts, self.num_deaths, self.num_excused, self.life = restarts, 0, 0, 0
        self.served: list[list[str]] = []
        """The requests of each call."""
        self.inside: list[list[str]] = []
        """Requests in flight, and for each death by poison, the other requests being served."""
        self.companions: list[str] = []
        self.group: Group

    def excuse(self) -> None:
        self.num_excused += 1

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def stream(
        self, method: Callable[..., Any], requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[Completion, None]:
        if not self.alive:
            raise WorkerError(f"{self.name}.generate(): it died")
        names, life = [request.id for request in requests], self.life
        self.served.append(names)
        self.inside.append(names)
        try:
            await asyncio.sleep(0.002)
            self.check(life)
            if self.left or any(name[0] in self.poisons for name in names):
                self.left = max(0, self.left - 1)
                self.companions += [other for call in self.inside if call is not names for other in call]
                self.die()
            self.check(life)
            for request in requests:
                for sample in range(request.n):
                    yield Completion(
                        request.id, sample, np.array([1], np.int32), np.zeros(1, np.float32), FinishReason.STOP, 0
                    )
        finally:
            self.inside.remove(names)

    def check(self, life: int) -> None:
        if self.life != life:
            raise WorkerError(f"{self.name}.generate(): it died")

    def die(self) -> None:
        self.life += 1
        self.num_deaths += 1
        comes_back = self.num_deaths - self.num_excused <= self.restarts
        self.group.tell("lost", self.index, comes_back)
        if comes_back:
            self.group.num_returning += 1
            asyncio.get_running_loop().call_later(0.001, self.group.bring_back, self.index)


class Group:
    """Replicas whose events arrive as from a supervisor."""

    before_return: Any = None

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas: Sequence[Any] = replicas
        self.callbacks: list[Callable[[ReplicaEvent], None]] = []
        self.num_returning = 0
        for replica in replicas:
            replica.group = self

    def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        self.callbacks.append(callback)

    def bring_back(self, index: int) -> None:
        self.num_returning -= 1
        self.tell("restored", index)

    def tell(self, kind: Literal["lost", "restored"], index: int, comes_back: bool = False) -> None:
        self.replicas[index].alive = kind == "restored"
        for callback in self.callbacks:
            callback(ReplicaEvent(kind, index, self.replicas[index].name, "killed by signal 9", comes_back))


def request(name: str, n: int = 1) -> GenerateRequest:
    return GenerateRequest(name, (1, 2), Sampling(), n, 0)


async def collect(service: RolloutService, names: Sequence[str], n: int = 1) -> list[Completion]:
    stream = service.generate([request(name, n) for name in names], Lane.TRAIN)
    async with aclosing(stream) as completions:  # type: ignore[type-var]
        return [completion async for completion in completions]


def served(replicas: Sequence[Replica], *calls: Sequence[str], n: int = 1) -> dict[str, list[str]]:
    """The errors of each request's samples, all calls being made at once."""
    service = RolloutService(Group(replicas), deadline_s=20.0)

    async def run() -> list[list[Completion]]:
        found = await asyncio.gather(*(collect(service, names, n) for names in calls))
        while replicas[0].group.num_returning:  # the calls need not wait for replicas that nothing asks
            await asyncio.sleep(0.001)
        return found

    found: dict[str, list[str]] = {}
    for completions in asyncio.run(run()):
        for completion in completions:
            found.setdefault(completion.request_id, []).append(completion.error)
            assert bool(len(completion.token_ids)) != bool(completion.error)
    assert service.outstanding == (0,) * len(replicas)
    return found


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("poisons", [*"ahp", "ab", "hi", "op", "ap", "abc"])
def test_poison_among_sixteen_fails_and_the_others_are_served(poisons: str, num_replicas: int) -> None:
    replicas = [Replica(index, poisons) for index in range(num_replicas)]
    found = served(replicas, LETTERS, n=2)
    assert sorted(found) == sorted(LETTERS)
    for name, errors in found.items():
        assert len(errors) == 2
        assert [bool(error) for error in errors] == [name in poisons] * 2
        if name in poisons:
            assert errors[0].startswith(f"rollout: request '{name}': replicas died 4 times while it was served: ")
            assert "it died" in errors[0]
    assert all(replica.alive for replica in replicas)
    counted = sum(replica.num_deaths - replica.num_excused for replica in replicas)
    assert counted == 0 or len(poisons) > 2, "no restart is used up, unless many in a row are poison"


def test_poison_among_calls_made_one_by_one_is_identified_too() -> None:
    replica = Replica(0, "dk")
    found = served([replica], *LETTERS)
    assert {name for name, errors in found.items() if any(errors)} == {"d", "k"}


def test_poison_among_many_is_narrowed_down_in_shares() -> None:
    names = [f"{letter}{number}" for letter in LETTERS for number in range(8)]
    replica = Replica(0, "")
    replica.poisons = "?"
    names[40] = "?"
    found = served([replica], names)
    assert {name for name, errors in found.items() if any(errors)} == {"?"}
    assert len(replica.served) <= 2 + len(names) / suspects.SHARE + suspects.SHARE + 2
    assert replica.alive


def test_a_suspect_is_served_alone_even_during_other_calls() -> None:
    replica = Replica(0, "a")
    service = RolloutService(Group([replica]), deadline_s=20.0)
    others: list[Completion] = []

    async def run() -> list[Completion]:
        poison = asyncio.create_task(collect(service, "a"))
        number = 0
        while not poison.done():
            others.extend(await collect(service, [f"z{number}"]))
            number += 1
        return await poison

    [found] = asyncio.run(run())
    assert found.error
    assert not any(completion.error for completion in others)
    assert all(len(replica.served[-1]) == 1 for _ in others)
    assert len([name for name in replica.companions if name != "a"]) <= suspects.TOGETHER, "with its first deaths only"


def test_a_replica_that_dies_whatever_it_is_asked_uses_up_its_restarts() -> None:
    replica = Replica(0, LETTERS)
    with pytest.raises(WorkerError, match="it died"):
        served([replica], LETTERS)
    assert not replica.alive
    assert replica.num_deaths <= 3 + 1 + suspects.TOGETHER + suspects.BLAMED_IN_A_ROW


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_deaths_without_a_request_at_fault_fail_nothing(deaths: int) -> None:
    replica = Replica(0, deaths=deaths)
    found = served([replica], LETTERS)
    assert not any(error for errors in found.values() for error in errors)
    assert replica.num_deaths == deaths
    if deaths <= suspects.TOGETHER:
        assert replica.num_excused == 0, "they count as ever"


def test_a_call_that_is_cancelled_while_it_waits_to_be_alone_leaves_the_replica_to_others() -> None:
    replica = Replica(0, "a", restarts=99)
    service = RolloutService(Group([replica]), deadline_s=20.0)

    async def run() -> list[Completion]:
        for wait_s in (0.003, 0.006, 0.009, 0.012):
            call = asyncio.create_task(collect(service, "abc"))
            await asyncio.sleep(wait_s)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        return await collect(service, "de")

    assert [completion.error for completion in asyncio.run(run())] == ["", ""]
    assert service.outstanding == (0,)
