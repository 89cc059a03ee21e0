"""Workers as threads: one call at a time, async ones together, streams that end, errors that name their worker."""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.cluster.replica import ReplicaGroup
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.errors import ConfigError, WorkerError
from rlcore.imports import STARTING_THRESHOLDS
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

DEADLINES = Deadlines(setup_s=20.0, call_s=20.0, close_s=5.0)


class Probe(Worker):
    """Shows how its methods are run."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.running = 0
        self.most = 0
        self.seen = threading.Event()
        self.ended = 0
        self.closed = 0

    def setup(self) -> None:
        self.thread = threading.get_ident()
        self.thresholds = gc.get_threshold()

    def close(self) -> None:
        self.closed += 1

    def where(self) -> tuple[int, int, str]:
        return threading.get_ident(), self.thread, str(self.context)

    def slow(self) -> int:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.01)
        self.running -= 1
        return self.most

    async def together(self, num: int) -> int:
        self.running += 1
        while self.running < num:
            await asyncio.sleep(0.001)
        return self.running

    async def counted_in_a_child(self) -> int:
        child = await self.context.children.start("collections:Counter", "aab", name=str(self.context))
        try:
            return int(await child.call("__getitem__", "a", deadline_s=10.0))
        finally:
            await child.close()

    async def forever(self) -> None:
        self.seen.set()
        await asyncio.sleep(3600)

    def stuck(self) -> None:
        self.seen.set()
        time.sleep(1.0)

    def fail(self) -> None:
        raise ValueError("a first line\nand a second")

    def misconfigured(self) -> None:
        raise ConfigError("wrong setting")

    def leave(self) -> None:
        raise SystemExit(4)

    async def count(self, num: int, fail_at: int = -1) -> AsyncIterator[int]:
        try:
            for index in range(num):
                if index == fail_at:
                    raise ValueError("no more")
                yield index
        finally:
            self.ended += 1


SOURCE = """
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from test_local_cluster_probe import Probe

    PROBE, INNER = Role("probe", Probe), type("Inner", (Probe,), {})

    @hookimpl
    def rlcore_agent_loops():
        asks = [
            WorkerRequest(PROBE, "p", replicas=2, threads=3),
            WorkerRequest(Role("inner", INNER), "p", replicas=2),
        ]
        return [Component("probing", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Probe, "p", Probe), WorkerClass(INNER, "p", INNER, embedded_in=PROBE)]
"""


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPlan]:
    """The plan of a run whose agent asks for two probes, each with another one inside."""
    monkeypatch.setitem(sys.modules, "test_local_cluster_probe", sys.modules[__name__])
    settings = [*SETTINGS, "rollout.agent=probing", "train.seed=7"]
    with importable(tmp_path / "site") as site:
        write_package(site, "local_probe", SOURCE)
        hooks, loaded = configure([], settings, ["null", "local_probe"])
        yield make_plan(loaded, hooks, Facts(cpus=2))


@contextlib.asynccontextmanager
async def started(plan: RunPlan, run_dir: Path, deadlines: Deadlines) -> AsyncIterator[dict[str, ReplicaGroup[Probe]]]:
    """The probes of the plan, closed at the end."""
    cluster = LocalCluster(cluster_context(plan, run_dir, deadlines))
    try:
        ours = [worker for worker in plan.workers if worker.asked_by != "core"]
        yield {worker.request.role.name: await cluster.start(worker) for worker in ours}
    finally:
        await cluster.close()


@pytest.mark.slow
def test_a_worker_starts_children_from_its_own_thread(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            assert await groups["probe"].each(Probe.counted_in_a_child) == [2, 2]
            assert await groups["inner"].each(Probe.counted_in_a_child) == [2, 2]

    asyncio.run(story())


def test_a_worker_has_its_own_thread_and_an_embedded_one_shares_it(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            places = await groups["probe"].each(Probe.where)
            inner = await groups["inner"].each(Probe.where)
            assert [name for _, _, name in places] == ["probe[0.0]", "probe[1.0]"]
            assert len({here for here, _, _ in places} | {threading.get_ident()}) == 3
            assert all(here == setup for here, setup, _ in places + inner)
            assert [here for here, _, _ in inner] == [here for here, _, _ in places]
            context = groups["probe"].replicas[0].worker.context
            assert (context.threads, context.device, context.seed, context.num_ranks) == (3, "cpu", 7, 1)
            assert groups["inner"].replicas[1].worker.context.host is groups["probe"].replicas[1].worker
            assert groups["inner"].replicas[0].worker.context.threads == 2

    asyncio.run(story())


def test_garbage_is_collected_rarely_during_setup(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            assert gc.get_threshold() == (700, 10, 10)
            assert groups["probe"].replicas[0].worker.thresholds == STARTING_THRESHOLDS

    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        asyncio.run(story())
    finally:
        gc.set_threshold(*before)


def test_plain_methods_run_one_at_a_time_and_async_ones_together(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[0]
            assert await asyncio.gather(*[probe.call(Probe.slow) for _ in range(5)]) == [1] * 5
            assert await asyncio.gather(*[probe.call(Probe.together, 4) for _ in range(4)]) == [4] * 4

    asyncio.run(story())


def test_errors_name_worker_method_and_cause(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[1]
            with pytest.raises(WorkerError) as caught:
                await probe.call(Probe.fail)
            line = "tests/cluster/test_local_cluster.py:80"
            assert str(caught.value) == f"probe[1].fail(): ValueError: a first line ({line})"
            assert isinstance(caught.value.__cause__, ValueError)
            with pytest.raises(ConfigError, match=r"^probe\[1\]\.misconfigured\(\): wrong setting$"):
                await probe.call(Probe.misconfigured)
            with pytest.raises(WorkerError, match=r"sys\.exit\(4\)"):
                await probe.call(Probe.leave)
            with pytest.raises(WorkerError, match="which has no missing"):
                await probe.call(lambda_named_missing)
            assert await probe.call(Probe.slow) == 1

    asyncio.run(story())


def lambda_named_missing(worker: Probe) -> None:
    """Stands for a method that the interface does not have."""


lambda_named_missing.__name__ = "missing"


async def gather_into(seen: list[int], items: AsyncIterator[int]) -> None:
    """Append what comes."""
    async for value in items:
        seen.append(value)


def test_a_stream_gives_its_items_in_order_and_its_error_in_place(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[0]
            assert [value async for value in probe.stream(Probe.count, 1000)] == list(range(1000))
            seen: list[int] = []
            with pytest.raises(WorkerError, match=r"^probe\[0\]\.count\(\): ValueError: no more \(\S+:92\)$"):
                await gather_into(seen, probe.stream(Probe.count, 10, fail_at=3))
            assert seen == [0, 1, 2]
            assert probe.worker.ended == 2

    asyncio.run(story())


def test_a_stream_that_is_closed_early_ends_the_workers_generator(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[0]
            async with contextlib.aclosing(probe.stream(Probe.count, 10**9)) as items:
                async for value in items:
                    if value == 5:
                        break
            assert probe.worker.ended == 1
            assert await probe.call(Probe.slow) == 1

    asyncio.run(story())


def test_a_call_has_a_deadline_with_a_name(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, replace(DEADLINES, call_s=0.05)) as groups:
            with pytest.raises(WorkerError, match=r"probe\[0\].*forever\(\) took longer than 0\.05 s"):
                await groups["probe"].replicas[0].call(Probe.forever)

    asyncio.run(story())


def test_closing_ends_pending_calls_and_refuses_later_ones(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[0]
            pending = asyncio.ensure_future(probe.call(Probe.forever))
            await asyncio.to_thread(probe.worker.seen.wait, 10)
        with pytest.raises(WorkerError, match=r"probe\[0\]: closed during"):
            await pending
        with pytest.raises(WorkerError, match=r"probe\[0\] is closed"):
            await probe.call(Probe.slow)
        with pytest.raises(WorkerError, match=r"probe\[0\] is closed"):
            await anext(probe.stream(Probe.count, 3))
        assert [replica.worker.closed for group in groups.values() for replica in group.replicas] == [1, 1, 1, 1]

    asyncio.run(story())


@pytest.mark.fault
def test_a_worker_that_is_stuck_is_left_behind_and_named(
    probed: RunPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, replace(DEADLINES, close_s=0.05)) as groups:
            probe = groups["probe"].replicas[0]
            pending = asyncio.ensure_future(probe.call(Probe.stuck))
            await asyncio.to_thread(probe.worker.seen.wait, 10)
        assert "probe[0]: still busy" in caplog.text
        await asyncio.gather(pending, return_exceptions=True)

    asyncio.run(story())
    for thread in threading.enumerate():
        if thread.name == "probe[0]":
            thread.join(10)


def test_a_cancelled_call_is_cancelled_in_the_worker_and_stays_a_cancellation(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[0]
            pending = asyncio.ensure_future(probe.call(Probe.forever))
            await asyncio.to_thread(probe.worker.seen.wait, 10)
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending

    asyncio.run(story())


@pytest.mark.fault
def test_a_call_cancelled_before_its_turn_is_never_made(probed: RunPlan, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(probed, tmp_path, DEADLINES) as groups:
            probe = groups["probe"].replicas[0]
            stuck = asyncio.ensure_future(probe.call(Probe.stuck))
            await asyncio.to_thread(probe.worker.seen.wait, 10)
            waiting = asyncio.ensure_future(probe.call(Probe.slow))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await stuck
            await probe.call(Probe.where)  # behind it
            assert probe.worker.most == 0

    asyncio.run(story())
