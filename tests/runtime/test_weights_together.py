"""Replicas take a version of the weights together or alone, and are restarted where they do not."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.actor import ActorWorker
from rlcore.errors import WorkerError
from rlcore.runtime.weight_sync import WeightsSync
from rlcore.types import WeightsHandle


class Actor:
    """An actor whose weights are of one kind."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.sent: list[tuple[int, int]] = []
        """(version, members) of each call of `send_weights`."""
        self.loading = 0
        """Replicas that have begun to load since."""
        self.fails = False

    async def call(self, method: Any, *arguments: Any) -> Any:
        if method is ActorWorker.send_weights:
            return await self._send(*arguments)
        return WeightsHandle(arguments[0], self.kind, f"there/{arguments[0]}")

    async def _send(self, handle: WeightsHandle) -> None:
        """Returns when its replicas have begun to load that version."""
        if self.fails:
            raise WorkerError("actor[0].send_weights(): out of memory")
        self.sent.append((handle.version, handle.members))
        await asyncio.sleep(0.01)
        assert self.loading == handle.members, "they load while it sends"
        self.loading = 0


class Replica:
    """A replica that loads weights, or never does."""

    alive = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.hangs = self.is_welcomed = False
        self.says = 0
        """The version with which it claims to sample; 0: the one that it got."""
        self.taken: list[tuple[int, int]] = []
        """(version, members) of each handle."""
        self.actor: Any = None
        """That which sends it weights."""
        self.restarted: list[str] = []

    async def call(self, method: Any, handle: WeightsHandle) -> int:
        if not (self.alive or self.is_welcomed):
            raise WorkerError(f"{self.name}: lost")
        if self.hangs:
            await asyncio.sleep(60)
        self.taken.append((handle.version, handle.members))
        if self.actor is not None:
            self.actor.loading += 1
            while self.actor.loading or self.actor.fails:
                await asyncio.sleep(0.001)
        return self.says or handle.version

    def restart(self, reason: str) -> None:
        self.alive, self.hangs = False, False
        self.restarted.append(reason)


class Group:
    """Replicas, and what is awaited before one of them returns."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = replicas
        self.prepare: Callable[[Any], Awaitable[None]]

    def before_return(self, prepare: Callable[[Any], Awaitable[None]]) -> None:
        self.prepare = prepare


def sync_of(kind: str, replicas: Group, directory: Path, deadline_s: float = 600.0) -> WeightsSync:
    group: Any = replicas
    actor: Any = Group(Actor(kind))
    return WeightsSync(actor, group, directory, deadline_s)


def test_the_living_take_a_version_together_and_one_that_returns_takes_it_alone(tmp_path: Path) -> None:
    async def story() -> None:
        first, second, third = replicas = [Replica(f"rollout[{index}]") for index in range(3)]
        group = Group(*replicas)
        sync = sync_of("nccl", group, tmp_path)
        await sync.publish(1)
        second.alive = False
        await sync.publish(2)
        second.is_welcomed = True  # its processes answer, and it is only given weights when it returns
        await sync.publish(3)
        await group.prepare(_back(second))
        await sync.publish(4)
        assert first.taken == third.taken == [(1, 3), (2, 2), (3, 2), (4, 3)]
        assert second.taken == [(1, 3), (3, 0), (4, 3)]

    asyncio.run(story())


def _back(replica: Replica) -> Replica:
    replica.alive = True
    return replica


def test_one_that_returns_with_another_version_does_not_serve(tmp_path: Path) -> None:
    async def story() -> None:
        group = Group(Replica("rollout[0]"))
        (replica,) = group.replicas
        await sync_of("tcp", group, tmp_path).publish(2)
        replica.says = 1
        with pytest.raises(WorkerError, match=r"rollout\[0\]: says that it samples with version 1 .* after version 2"):
            await group.prepare(replica)

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["directory", "tcp", "shm"])
def test_all_other_kinds_are_taken_alone(kind: str, tmp_path: Path) -> None:
    replicas = [Replica("rollout[0]"), Replica("rollout[1]")]
    asyncio.run(sync_of(kind, Group(*replicas), tmp_path).publish(1))
    assert [replica.taken for replica in replicas] == [[(1, 0)], [(1, 0)]]


def over_ipc(*replicas: Replica, directory: Path, deadline_s: float = 600.0) -> tuple[Any, WeightsSync, Any]:
    """An actor that sends weights to these replicas, what syncs them, and their group."""
    actor, group = Actor("ipc"), Group(*replicas)
    for replica in replicas:
        replica.actor = actor
    of_actor, of_rollout = Group(actor), group
    return actor, WeightsSync(of_actor, of_rollout, directory, deadline_s), group  # type: ignore[arg-type]


def test_the_actor_sends_to_the_living_together_and_to_one_that_returns_again(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Replica("rollout[0]"), Replica("rollout[1]")
        actor, sync, group = over_ipc(first, second, directory=tmp_path)
        await sync.publish(1)
        second.alive = False
        await sync.publish(2)
        second.is_welcomed = True
        await group.prepare(second)
        first.alive = False
        await sync.publish(3)
        assert actor.sent == [(1, 2), (2, 1), (2, 1)], "no replica is there for the third version"
        assert (first.taken, second.taken) == ([(1, 2), (2, 1)], [(1, 2), (2, 1)])

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_an_actor_that_cannot_send_is_the_error(tmp_path: Path) -> None:
    async def story() -> None:
        replica = Replica("rollout[0]")
        actor, sync, group = over_ipc(replica, directory=tmp_path)
        await sync.publish(1)
        actor.fails = True
        replica.says = 1  # it has not loaded the next version
        with pytest.raises(WorkerError, match=r"^actor\[0\]\.send_weights\(\): out of memory$"):
            await sync.publish(2)
        with pytest.raises(WorkerError, match="out of memory"):
            await group.prepare(replica)

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_one_that_takes_too_long_is_restarted_and_the_others_continue(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Replica("rollout[0]"), Replica("rollout[1]")
        second.hangs = True
        group = Group(first, second)
        sync = sync_of("nccl", group, tmp_path, deadline_s=0.05)
        await sync.publish(1)
        assert second.restarted == [
            "it took longer than rollout.weights_deadline_s=0.05 to load version 1 of the weights"
        ]
        assert not first.restarted
        await group.prepare(_back(second))
        assert second.taken == [(1, 0)]

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_one_that_hangs_when_it_returns_keeps_no_version_from_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Replica("rollout[0]"), Replica("rollout[1]")
        group = Group(first, second)
        sync = sync_of("tcp", group, tmp_path, deadline_s=0.05)
        await sync.publish(1)
        second.alive, second.hangs, second.is_welcomed = False, True, True
        returning = asyncio.create_task(group.prepare(second))
        await asyncio.sleep(0)
        await sync.publish(2)
        assert first.taken == [(1, 0), (2, 0)]
        with pytest.raises(
            WorkerError, match=r"^rollout\[1\]: it took longer than rollout\.weights_deadline_s=0\.05 to"
        ):
            await returning

    asyncio.run(asyncio.wait_for(story(), 20.0))
