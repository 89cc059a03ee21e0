"""Large arguments of workers in processes: copied once for all ranks, off the loop, and gone with who had them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster import shared_arrays
from rlcore.cluster.local import LocalCluster
from rlcore.cluster.replica import ReplicaGroup
from rlcore.cluster.shared_arrays import Message
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.errors import WorkerError
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

SOURCE = """
    import asyncio, os, threading, time
    import numpy as np
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from rlcore.contracts.workers import Worker

    class Echo(Worker):
        def setup(self): ...

        def echo(self, value):
            return value

        def rank(self):
            return self.context.rank

        def odd_elsewhere(self):
            return (lambda: 0) if self.context.rank else "from rank 0"

        def fails_elsewhere(self):
            if self.context.rank:
                raise ValueError("only here")

        def write(self, value):
            value[0] = 1

        async def die_with(self, value):
            self.kept = value
            if self.context.rank == self.context.num_ranks - 1:
                os.kill(os.getpid(), 9)
            await asyncio.sleep(3600)

        def keep(self, value):
            self.kept = value

        async def items(self, value, num):
            for _ in range(num):
                yield value

    @hookimpl
    def rlcore_agent_loops():
        asks = [
            WorkerRequest(Role("two", Echo), "e", ranks=2),
            WorkerRequest(Role("one", Echo), "e", isolated=True),
        ]
        return [Component("echoes", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Echo, "e", Echo)]
"""
MANY = 1 << 20
"""Float32 numbers: 4 MiB."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory from which the test's plugin is imported."""
    with importable(tmp_path / "site") as directory:
        write_package(directory, "echoing_ranks", SOURCE)
        yield directory


@contextlib.asynccontextmanager
async def started(run_dir: Path) -> AsyncIterator[dict[str, ReplicaGroup[Any]]]:
    """A worker of two ranks and one of one, which is restarted when it dies."""
    settings = [*SETTINGS, "rollout.agent=echoes"]
    hooks, loaded = configure([], settings, ["null", "echoing_ranks"])
    plan = make_plan(loaded, hooks, Facts(cpus=2))
    cluster = LocalCluster(cluster_context(plan, run_dir, Deadlines(setup_s=60, call_s=60, close_s=5)))
    try:
        ours = [worker for worker in plan.workers if worker.asked_by != "core"]
        yield {worker.request.role.name: await cluster.start(worker) for worker in ours}
    finally:
        await cluster.close()


def holders() -> set[int]:
    """Processes that have shared memory of this one mapped or open."""
    name = f"{shared_arrays.NAME}{os.getpid()}"
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            files = [os.readlink(link) for link in (entry / "fd").iterdir()]
            if name in (entry / "maps").read_text() or any(name in file for file in files):
                found.add(int(entry.name))
    return found


@pytest.mark.slow
def test_two_ranks_get_one_copy_which_is_made_off_the_loop_and_one_answers(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    share = Message.share

    def recorded(message: Message) -> None:
        copied.append(threading.get_ident())
        share(message)

    monkeypatch.setattr(Message, "share", recorded)
    value = np.arange(MANY, dtype=np.float32)

    async def story() -> None:
        async with started(tmp_path) as groups:
            Echo = sys.modules["echoing_ranks"].Echo
            two = groups["two"].replicas[0]
            found = await two.call(Echo.echo, value)
            assert np.array_equal(found, value)
            assert not found.flags.writeable
            del found  # it holds a descriptor
            assert len(copied) == 1
            assert copied[0] != threading.get_ident()
            assert await two.call(Echo.rank) == 0
            assert await two.call(Echo.odd_elsewhere) == "from rank 0"
            with pytest.raises(WorkerError, match="only here"):
                await two.call(Echo.fails_elsewhere)
            for some in (value, value[:3]):
                with pytest.raises(WorkerError, match="read-only"):
                    await two.call(Echo.write, some)
            copies = [copy async for copy in two.stream(Echo.items, value, 5)]
            assert len(copies) == 10
            assert all(np.array_equal(copy, value) for copy in copies)

    asyncio.run(story())


@pytest.mark.fault
def test_a_rank_that_dies_with_a_batch_takes_its_memory_along(site: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path) as groups:
            Echo = sys.modules["echoing_ranks"].Echo
            two, one = groups["two"].replicas[0], groups["one"].replicas[0]
            with pytest.raises(WorkerError, match="signal 9"):
                await two.call(Echo.die_with, np.ones(MANY, np.float32))
            with pytest.raises(WorkerError, match="signal 9"):
                await one.call(Echo.die_with, np.ones(MANY, np.float32))
            until = time.monotonic() + 30
            while not one.alive:
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
            assert np.array_equal(await one.call(Echo.echo, np.full(MANY, 3.0)), np.full(MANY, 3.0))
            await one.call(Echo.keep, np.full(MANY, 3.0))
            assert holders()  # the test can see them
        while holders():
            assert time.monotonic() < until
            await asyncio.sleep(0.05)

    asyncio.run(story())


@pytest.mark.fault
def test_a_call_that_is_cancelled_while_its_arrays_are_copied_leaves_nothing_open(site: Path, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path) as groups:
            Echo = sys.modules["echoing_ranks"].Echo
            one = groups["one"].replicas[0]
            call = asyncio.ensure_future(one.call(Echo.keep, np.ones(40 * MANY, np.float32)))
            await asyncio.sleep(0.001)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert call.cancelled()
            assert await one.call(Echo.echo, "still there") == "still there"
            del call
            until = time.monotonic() + 30
            while holders() - {groups["one"].replicas[0].seat.body.pids[0]}:
                assert time.monotonic() < until
                await asyncio.sleep(0.05)

    asyncio.run(story())


CONTROLLER = """
    import asyncio, sys
    from pathlib import Path
    import numpy as np
    sys.path.insert(0, sys.argv[3])
    sys.path.insert(0, sys.argv[2])
    from test_arrays_of_ranks import MANY, started

    async def main():
        async with started(Path(sys.argv[1])) as groups:
            Echo = sys.modules["echoing_ranks"].Echo
            await groups["two"].replicas[0].call(Echo.keep, np.ones(MANY, np.float32))
            print("kept", flush=True)
            await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.fault
def test_a_controller_that_is_killed_leaves_no_memory(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(CONTROLLER), str(tmp_path), str(site), str(Path(__file__).parent)]
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        try:
            assert controller.stdout is not None
            assert controller.stdout.readline() == "kept\n"
            name = f"{shared_arrays.NAME}{controller.pid}"
            assert named(name)
        finally:
            controller.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while named(name):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not {file for file in set(os.listdir("/dev/shm")) - before if "rlcore" in file}


def named(name: str) -> list[int]:
    """Processes that have memory of that name mapped."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name in (entry / "maps").read_text():
                found.append(int(entry.name))
    return found
