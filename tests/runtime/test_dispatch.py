"""Work goes to the replica that owes the least, stays with its home, and waits while no replica serves."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlcore.contracts import dispatch
from rlcore.contracts.dispatch import ReplicaDispatcher
from rlcore.contracts.workers import ReplicaEvent, WorkerGroup
from rlcore.errors import WorkerError


class Group:
    """Replicas that die and come back on command."""

    def __init__(self, num: int) -> None:
        self.replicas = [SimpleNamespace(name=f"rollout[{index}]", alive=True) for index in range(num)]
        self.callbacks: list[Callable[[ReplicaEvent], None]] = []

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        self.callbacks.append(callback)

    def tell(self, kind: Any, index: int, comes_back: bool = False) -> None:
        self.replicas[index].alive = kind == "restored"
        for callback in self.callbacks:
            callback(ReplicaEvent(kind, index, self.replicas[index].name, "killed by signal 9", comes_back))


def dispatcher_of(group: Group) -> ReplicaDispatcher:
    return ReplicaDispatcher(cast(WorkerGroup[Any], group))


def test_work_goes_to_the_replica_that_owes_the_least_and_serves() -> None:
    group = Group(3)
    dispatcher = dispatcher_of(group)
    assert [dispatcher.assign(num) for num in (4, 1, 2, 1, 1)] == [0, 1, 2, 1, 1]
    dispatcher.finish(0, 4)
    assert dispatcher.outstanding == [0, 3, 2]
    group.tell("lost", 0)
    assert dispatcher.assign(1) == 2
    group.tell("lost", 1)
    group.tell("lost", 2)
    assert dispatcher.assign(1) == 0  # whose call will fail, and say so


def test_work_of_one_home_stays_with_its_replica_while_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    dispatcher = dispatcher_of(group)
    assert [dispatcher.assign(2, "talk"), dispatcher.assign(1), dispatcher.assign(5, "talk")] == [0, 1, 0]
    group.tell("lost", 0)
    assert dispatcher.assign(1, "talk") == 1
    group.tell("restored", 0)
    assert dispatcher.assign(9, "talk") == 1
    monkeypatch.setattr(dispatch, "REMEMBERED_HOMES", 1)
    assert dispatcher.assign(1, "another") == 0
    assert dispatcher.assign(1, "talk") == 0  # it was forgotten


def test_a_wait_ends_when_a_replica_serves_again_or_none_will() -> None:
    async def work() -> None:
        group = Group(2)
        dispatcher = dispatcher_of(group)
        group.tell("lost", 0, comes_back=True)
        group.tell("lost", 1, comes_back=True)
        waiting = asyncio.create_task(dispatcher.wait_for_one(WorkerError("rollout failed")))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        group.tell("restored", 1)
        await waiting
        group.tell("lost", 1)
        waiting = asyncio.create_task(dispatcher.wait_for_one(WorkerError("rollout failed")))
        await asyncio.sleep(0.01)
        group.tell("lost", 0)
        with pytest.raises(WorkerError, match=r"^rollout failed; rollout\[0\]: killed by signal 9$"):
            await waiting

    asyncio.run(asyncio.wait_for(work(), 10.0))
