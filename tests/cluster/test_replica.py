"""A replica's supervisor counts deaths, and forgets them when the replica has served for long."""

import asyncio
from typing import Any

import pytest

from rlcore.cluster import replica
from rlcore.cluster.replica import Replica, ReplicaSupervisor
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.workers import ReplicaEvent
from rlcore.errors import WorkerError

DEADLINES = Deadlines(setup_s=5.0, call_s=5.0, close_s=1.0)


class Body:
    """A body that ends on command."""

    rendezvous = ""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self.over.is_set()

    async def ended(self) -> str:
        await self.over.wait()
        return "its node left"

    async def close(self, deadline_s: float) -> None:
        self.over.set()


class Life:
    """A supervised replica, and the events of its deaths."""

    def __init__(self, max_restarts: int) -> None:
        self.bodies: list[Body] = []
        self.events: asyncio.Queue[ReplicaEvent] = asyncio.Queue()
        self.seat = ReplicaSupervisor("rollout[0]", 0, self._launch, max_restarts, DEADLINES)
        self.seat.on_event.append(self.events.put_nowait)

    async def _launch(self) -> Any:
        self.bodies.append(Body())
        return self.bodies[-1]

    async def die(self) -> bool:
        """True if it comes back; it serves again then."""
        self.bodies[-1].over.set()
        lost = await self.events.get()
        if lost.comes_back:
            assert (await self.events.get()).kind == "restored"
        return lost.comes_back


@pytest.mark.parametrize(("steady_s", "expected"), [(600.0, [True, False]), (0.0, [True, True, True, True])])
def test_a_replica_that_has_served_for_long_has_all_its_restarts_again(
    steady_s: float, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "STEADY_S", steady_s)

    async def story() -> None:
        life = Life(max_restarts=1)
        await life.seat.start()
        assert [await life.die() for _ in expected] == expected
        assert life.seat.alive == expected[-1]
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_a_callback_that_raises_is_logged_and_the_replica_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    def is_wrong(event: ReplicaEvent) -> None:
        raise KeyError(event.kind)

    async def story() -> None:
        life = Life(max_restarts=1)
        life.seat.on_event.insert(0, is_wrong)
        await life.seat.start()
        assert [await life.die(), await life.die()] == [True, False]
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    kinds = [record.getMessage().partition("is_wrong: ")[2].partition(" (")[0] for record in errors]
    assert kinds == ["KeyError: 'lost'", "KeyError: 'restored'", "KeyError: 'lost'"]
    assert all(record.exc_info for record in errors), "with a traceback"


def test_a_loss_without_a_restart_left_says_so_to_every_call() -> None:
    async def story() -> None:
        life = Life(max_restarts=0)
        await life.seat.start()
        assert not await life.die()
        with pytest.raises(WorkerError, match=r"^rollout\[0\]: lost \(its node left\); only isolated workers"):
            _ = life.seat.body
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_an_excuse_gives_no_more_restarts_than_there_are() -> None:
    async def story() -> None:
        life = Life(max_restarts=1)
        await life.seat.start()
        life.seat.excuse()
        assert [await life.die(), await life.die()] == [True, False]
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))


@pytest.mark.parametrize("served_s", [0.0, 2 * replica.STEADY_S])
def test_a_death_that_is_excused_before_it_is_counted_does_not_count(served_s: float) -> None:
    async def story() -> None:
        life = Life(max_restarts=1)
        await life.seat.start()
        life.bodies[0].over.set()  # and the calls with it, before `_watch` runs
        life.seat.excuse()
        life.seat.excuse()
        life.seat._served_since -= served_s
        assert [await life.die(), await life.die(), await life.die()] == [True, True, False]
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))


def test_a_restarted_replica_streams_nothing_until_it_is_prepared() -> None:
    refused: list[str] = []

    async def story() -> None:
        life = Life(max_restarts=1)
        handle = Replica("rollout[0]", "rollout", RolloutWorker, life.seat, DEADLINES)

        async def prepare() -> None:
            assert id(life.seat.body) == id(life.bodies[1]), "it can be called, such as to load weights"
            with pytest.raises(WorkerError, match=r"its node left.*; it is being restarted") as caught:
                await anext(handle.stream(RolloutWorker.generate, []))
            refused.append(str(caught.value))

        life.seat.before_return.append(prepare)
        await life.seat.start()
        assert await life.die()
        assert id(life.seat.serving_body) == id(life.bodies[1])
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))
    assert len(refused) == 1


def test_an_abandoned_replica_is_ended_and_comes_back_like_one_that_died() -> None:
    async def story() -> None:
        life = Life(max_restarts=1)
        await life.seat.start()
        for comes_back in (True, False):
            life.seat.restart("it takes no weights")
            assert not life.seat.alive, "at once"
            life.seat.restart("said twice")
            lost = await life.events.get()
            assert (lost.reason, lost.comes_back) == ("it takes no weights", comes_back)
            assert comes_back == ((await life.events.get()).kind == "restored" if comes_back else False)
        assert [body.alive for body in life.bodies] == [False, False]
        life.seat.restart("it is gone already")
        await life.seat.close()

    asyncio.run(asyncio.wait_for(story(), 20.0))
