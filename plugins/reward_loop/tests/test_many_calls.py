"""Calls in flight are not threads. Their number is `concurrency`, 1024 by default."""

import asyncio
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rlcore_reward_loop import build
from rlcore_reward_loop.client.http import OTHER_FILES, allow_connections
from rlcore_reward_loop.settings import RewardLoopSettings

from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.types import RewardStatus

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n{"score": 1.0}'


class FullHouse:
    """A service that answers no call before so many ask at the same time."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.num_open, self.most_open = wanted, 0, 0
        self.full = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                if self.num_open == self.wanted:
                    self.full.set()
                await self.full.wait()
                self.num_open -= 1
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            writer.close()


@pytest.fixture
def _few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("_few_files")
def test_a_manager_makes_room_for_as_many_connections_as_its_services_may_have(
    tmp_path: Path, one_service: Callable[..., RewardLoopSettings], caplog: pytest.LogCaptureFixture
) -> None:
    manager = build(reward_context({}, tmp_path, section=one_service("http://127.0.0.1:1", concurrency=500)))

    async def run() -> None:
        await manager.start()
        await manager.close()

    asyncio.run(run())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == 500 + 64 + OTHER_FILES
    if hard == resource.RLIM_INFINITY:
        return
    allow_connections(hard)
    assert "a lower plugins.reward_loop.services.<name>.concurrency" in caplog.text


@pytest.mark.fault
def test_a_thousand_calls_are_in_flight_by_default_without_a_thread_more(
    tmp_path: Path, one_service: Callable[..., RewardLoopSettings]
) -> None:
    async def run() -> None:
        house = FullHouse(1024)
        server = await asyncio.start_server(house.serve, "127.0.0.1", 0, backlog=2048)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        manager = build(reward_context({}, tmp_path, section=one_service(url)))
        threads = threading.active_count()
        allow_connections(4096)  # the service's ends are this process's, too
        try:
            await manager.start()
            scored = await score_all(manager, [make_trajectory(index // 4, index % 4) for index in range(1100)])
            assert threading.active_count() == threads
            assert manager.metrics()["reward/in_flight_max"] == 1024.0
        finally:
            await manager.close()
            server.close()
            await server.wait_closed()
        assert house.most_open == 1024
        assert [sample.reward.status for sample in scored] == [RewardStatus.OK] * 1100

    asyncio.run(run())
