"""A server that dies is started again while servers have the devices, and no role trains during its start."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rlcore.cluster.replica import Replica, ReplicaGroup, ReplicaSupervisor
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.rollout import RolloutWorker
from rlcore.runtime.colocation import DeviceLease

DEADLINES = Deadlines(setup_s=5.0, call_s=5.0, close_s=1.0)


class Body:
    """A server's processes, which end on command."""

    rendezvous = ""

    def __init__(self, calls: list[str]) -> None:
        self.over = asyncio.Event()
        self._calls = calls

    @property
    def alive(self) -> bool:
        return not self.over.is_set()

    async def ended(self) -> str:
        await self.over.wait()
        return "it was killed"

    async def close(self, deadline_s: float) -> None:
        self.over.set()

    async def call(self, role: str, method: str, *arguments: Any, **named: Any) -> None:
        self._calls.append(method)


class Server:
    """A supervised server, its starts and what it is told."""

    def __init__(self, faults: int = 0, sleeps: bool = True) -> None:
        self.calls: list[str] = []
        self.bodies: list[Body] = []
        self.may_finish, self.began = asyncio.Event(), asyncio.Event()
        self.may_finish.set()
        self._faults = faults
        self.seat = ReplicaSupervisor("rollout[0]", 0, self._launch, 3, DEADLINES)
        self.handle = Replica("rollout[0]", "rollout", RolloutWorker, self.seat, DEADLINES)
        group, self.recorded = ReplicaGroup([self.handle]), list[str]()
        servers, awake = ([("rollout", group, RolloutWorker)], []) if sleeps else ([], [group])
        self.lease = DeviceLease(servers, lambda name, _: self.recorded.append(name), deadline_s=5.0, awake=awake)

    async def _launch(self) -> Any:
        self.calls.append("start")
        self.began.set()
        await self.may_finish.wait()
        if len(self.bodies) == 1 and self._faults:
            self._faults -= 1
            raise RuntimeError("the device is full")
        self.bodies.append(Body(self.calls))
        return self.bodies[-1]

    async def die(self) -> None:
        """End it; returns when the death has been seen."""
        self.began.clear()
        self.bodies[-1].over.set()
        while self.seat.alive:
            await asyncio.sleep(0)

    async def back(self) -> None:
        """Returns when it serves again."""
        while not self.seat.alive:
            await asyncio.sleep(0)


def calls_during(story: Callable[[Server], Awaitable[None]], faults: int = 0, sleeps: bool = True) -> list[str]:
    """The starts and calls of a server during a story, and '--' where the story says so."""

    async def run() -> list[str]:
        server = Server(faults, sleeps)
        await server.seat.start()
        await story(server)
        await server.seat.close()
        return server.calls

    return asyncio.run(asyncio.wait_for(run(), 20.0))


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_server_that_dies_while_the_actor_trains_is_started_in_the_servers_turn() -> None:
    async def story(server: Server) -> None:
        await server.lease.train()
        await server.die()
        await turns()
        server.calls.append("--")
        await server.lease.serve()
        await server.back()
        await server.lease.train()

    assert calls_during(story) == ["start", "sleep", "--", "start", "sleep"]


def test_no_role_trains_while_a_server_is_being_started() -> None:
    async def story(server: Server) -> None:
        server.may_finish.clear()
        await server.die()
        await server.began.wait()
        training = asyncio.create_task(server.lease.train())
        await turns()
        assert not training.done()
        server.calls.append("--")
        server.may_finish.set()
        await training

    assert calls_during(story) == ["start", "start", "--", "sleep"]


@pytest.mark.slow
def test_roles_train_between_two_tries_to_start_a_server() -> None:
    """The next try is a second later, and then the actor has the devices."""

    async def story(server: Server) -> None:
        await server.die()
        await server.began.wait()
        await server.lease.train()
        await asyncio.sleep(1.5)
        server.calls.append("--")
        await server.lease.serve()
        await server.back()

    assert calls_during(story, faults=1) == ["start", "start", "--", "start"]


def test_a_server_that_stays_awake_is_started_again_while_no_role_trains_either() -> None:
    async def story(server: Server) -> None:
        assert not server.lease.shared
        await server.lease.train()
        await server.die()
        await turns()
        server.calls.append("--")
        server.may_finish.clear()
        await server.lease.serve()
        await server.began.wait()
        training = asyncio.create_task(server.lease.train())
        await turns()
        assert not training.done()
        server.may_finish.set()
        await training
        assert server.recorded == []

    assert calls_during(story, sleeps=False) == ["start", "--", "start"]
