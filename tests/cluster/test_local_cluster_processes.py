"""Isolated workers: in separate processes that can be killed, are started again, and end with the run."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.cluster.process import ProcessBody, WorkerProcess
from rlcore.cluster.replica import ReplicaGroup
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.workers import ReplicaEvent
from rlcore.errors import ConfigError, WorkerError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.leaks import is_running
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

pytestmark = pytest.mark.fault

DEADLINES = Deadlines(setup_s=20.0, call_s=20.0, close_s=5.0)

SOURCE = """
    import asyncio, os, sys, time
    from rlcore.errors import ConfigError
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from rlcore.contracts.workers import Worker

    class Probe(Worker):
        def setup(self):
            self.ended = self.running = 0
            broken = self.context.run_dir / "broken"
            if broken.exists():
                os.system(broken.read_text())
                raise RuntimeError("this is broken")

        def close(self):
            (self.context.run_dir / f"closed-{self.context}").touch()

        def where(self):
            heavy = sorted({"torch", "ray", "transformers"} & set(sys.modules))
            return os.getpid(), str(self.context), os.environ["OMP_NUM_THREADS"], heavy, self.context.host is not None

        def echo(self, value):
            return value

        async def together(self, num):
            self.running += 1
            while self.running < num:
                await asyncio.sleep(0.001)
            return self.running

        async def counted_in_a_child(self):
            child = await self.context.children.start("collections:Counter", "aab", name=str(self.context))
            try:
                return await child.call("__getitem__", "a", deadline_s=10.0)
            finally:
                await child.close()

        async def forever(self):
            try:
                await asyncio.sleep(3600)
            finally:
                self.ended += 1

        def stuck(self):
            time.sleep(3600)

        def fail(self):
            raise ValueError("a first line\\nand a second")

        def misconfigured(self):
            raise ConfigError("wrong setting")

        def odd(self):
            return lambda: 0

        async def count(self, num, fail_at=-1):
            try:
                for index in range(num):
                    if index == fail_at:
                        raise ValueError("no more")
                    yield index
                    await asyncio.sleep(0)
            finally:
                self.ended += 1

        def num_ended(self):
            return self.ended

    class Inner(Probe):
        pass

    PROBE = Role("probe", Probe)

    @hookimpl
    def rlcore_agent_loops():
        asks = [
            WorkerRequest(PROBE, "p", replicas=2, threads=3, isolated=True),
            WorkerRequest(Role("inner", Inner), "p", replicas=2),
        ]
        return [Component("probing", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Probe, "p", Probe), WorkerClass(Inner, "p", Inner, embedded_in=PROBE)]
"""
FAILED = r"\.fail\(\): ValueError: a first line \(\S+_probe\.py:50\)$"
BROKEN = r"probe\[\d\]\.setup\(\): RuntimeError: this is broken \(\S+_probe\.py:15\)"


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """The module of the probing plugin."""
    with importable(tmp_path / "site") as site:
        write_package(site, "isolated_probe", SOURCE)
        import isolated_probe  # type: ignore[import-not-found]

        yield isolated_probe


def planned(*overrides: str) -> RunPlan:
    """The plan of a run whose agent asks for two isolated probes, each with another one inside."""
    settings = [*SETTINGS, "rollout.agent=probing", "train.seed=7", *overrides]
    hooks, loaded = configure([], settings, ["null", "isolated_probe"])
    return make_plan(loaded, hooks, Facts(cpus=2))


@contextlib.asynccontextmanager
async def started(
    run_dir: Path, *overrides: str, deadlines: Deadlines = DEADLINES
) -> AsyncIterator[dict[str, ReplicaGroup[Any]]]:
    """The probes of the plan, closed at the end."""
    plan = planned(*overrides)
    cluster = LocalCluster(cluster_context(plan, run_dir, deadlines))
    try:
        ours = [worker for worker in plan.workers if worker.asked_by != "core"]
        yield {worker.request.role.name: await cluster.start(worker) for worker in ours}
    finally:
        await cluster.close()


async def taken(items: AsyncIterator[int]) -> list[int]:
    """The items of the stream, until it ends."""
    return [value async for value in items]


class Events:
    """Keeps the events of a group and lets a test wait for one."""

    def __init__(self, group: ReplicaGroup[Any]) -> None:
        self.seen: list[ReplicaEvent] = []
        self._changed = asyncio.Event()
        group.on_event(self._add)

    def _add(self, event: ReplicaEvent) -> None:
        self.seen.append(event)
        self._changed.set()

    async def until(self, num: int) -> list[tuple[str, int]]:
        """Kinds and indices of the first `num` events."""
        async with asyncio.timeout(20):
            while len(self.seen) < num:
                self._changed.clear()
                await self._changed.wait()
        return [(event.kind, event.index) for event in self.seen]


def test_isolated_workers_serve_calls_and_streams_in_separate_processes(plugin: ModuleType, tmp_path: Path) -> None:
    Probe = plugin.Probe

    async def story() -> None:
        async with started(tmp_path) as groups:
            places = await groups["probe"].each(Probe.where)
            inner = await groups["inner"].each(plugin.Inner.where)
            assert [place[1:] for place in places] == [("probe[0.0]", "3", [], False), ("probe[1.0]", "3", [], False)]
            assert [process[0] for process in inner] == [place[0] for place in places]
            assert [process[4] for process in inner] == [True, True]
            assert len({place[0] for place in places} | {os.getpid()}) == 3
            probe = groups["probe"].replicas[0]
            assert await asyncio.gather(*[probe.call(Probe.together, 4) for _ in range(4)]) == [4] * 4
            assert await groups["probe"].each(Probe.counted_in_a_child) == [2, 2]
            large = b"x" * 3_000_000
            assert await probe.call(Probe.echo, large) == large
            assert await taken(probe.stream(Probe.count, 300)) == list(range(300))
            async with contextlib.aclosing(probe.stream(Probe.count, 10**9)) as items:
                async for value in items:
                    if value == 5:
                        break
            assert await probe.call(Probe.num_ended) == 2
            pending = asyncio.ensure_future(probe.call(Probe.forever))
            await asyncio.sleep(0.05)
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            assert await probe.call(Probe.num_ended) == 3

    asyncio.run(story())
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == [
        f"closed-{role}[{index}.0]" for role in ("inner", "probe") for index in (0, 1)
    ]


def test_errors_in_a_process_name_worker_method_and_cause(plugin: ModuleType, tmp_path: Path) -> None:
    Probe = plugin.Probe

    async def story() -> None:
        async with started(tmp_path) as groups:
            probe = groups["probe"].replicas[1]
            with pytest.raises(WorkerError, match=rf"^probe\[1\]{FAILED}") as caught:
                await probe.call(Probe.fail)
            assert "in fail" in getattr(caught.value.__cause__, "trace", "")
            with pytest.raises(ConfigError, match=r"^probe\[1\]\.misconfigured\(\): wrong setting$"):
                await probe.call(Probe.misconfigured)
            with pytest.raises(WorkerError, match=r"^probe\[1\]\.count\(\): ValueError: no more \(\S+:62\)$"):
                await taken(probe.stream(Probe.count, 10, fail_at=3))
            with pytest.raises(WorkerError, match=r"probe\[1\]\.odd\(\): .*cannot be sent"):
                await probe.call(Probe.odd)
            with pytest.raises(WorkerError, match=r"probe\[1\]\.echo\(\): its arguments cannot be sent"):
                await probe.call(Probe.echo, lambda: 0)
            assert await probe.call(Probe.echo, 5) == 5

    asyncio.run(story())


def test_a_replica_that_is_killed_is_named_restarted_and_prepared_before_it_serves(
    plugin: ModuleType, tmp_path: Path
) -> None:
    Probe = plugin.Probe

    async def story() -> None:
        async with started(tmp_path) as groups:
            group, probe = groups["probe"], groups["probe"].replicas[0]
            events, prepared = Events(group), []

            async def prepare(replica: Any) -> None:
                prepared.append((replica.alive, await replica.call(Probe.echo, "weights")))

            group.before_return(prepare)
            before = (await probe.call(Probe.where))[0]
            waiting = asyncio.ensure_future(probe.call(Probe.forever))
            streaming = asyncio.ensure_future(taken(probe.stream(Probe.count, 10**9)))
            await asyncio.sleep(0.05)
            os.kill(before, signal.SIGKILL)
            for value in (waiting, streaming):
                with pytest.raises(WorkerError, match=r"^probe\[0\]\.\w+\(\): .*probe\[0\].*killed by signal 9"):
                    await value
            assert await events.until(1) == [("lost", 0)]
            assert not probe.alive
            with pytest.raises(WorkerError, match=r"^probe\[0\]: lost .*being restarted"):
                await probe.call(Probe.echo, 1)
            assert await group.replicas[1].call(Probe.echo, 2) == 2
            assert await events.until(2) == [("lost", 0), ("restored", 0)]
            assert probe.alive
            assert prepared == [(False, "weights")]
            after, inner = await probe.call(Probe.where), await groups["inner"].replicas[0].call(plugin.Inner.where)
            assert after[0] != before
            assert inner[0] == after[0]

    asyncio.run(story())


def test_restarts_are_bounded_and_a_failing_one_counts(plugin: ModuleType, tmp_path: Path) -> None:
    Probe = plugin.Probe

    async def story() -> None:
        async with started(tmp_path, "cluster.max_restarts=1") as groups:
            probe, events = groups["probe"].replicas[0], Events(groups["probe"])
            (tmp_path / "broken").touch()
            os.kill((await probe.call(Probe.where))[0], signal.SIGKILL)
            assert await events.until(2) == [("lost", 0), ("lost", 0)]
            with pytest.raises(WorkerError, match=r"^probe\[0\]: lost .*cluster\.max_restarts=1.*not restarted again"):
                await probe.call(Probe.echo, 1)

    asyncio.run(story())


def test_a_process_that_passes_a_deadline_is_killed_and_replaced(plugin: ModuleType, tmp_path: Path) -> None:
    Probe = plugin.Probe

    async def story() -> None:
        async with started(tmp_path, deadlines=replace(DEADLINES, call_s=0.3)) as groups:
            probe, events = groups["probe"].replicas[0], Events(groups["probe"])
            process = (await probe.call(Probe.where))[0]
            with pytest.raises(WorkerError, match=r"^probe\[0\]\.stuck\(\) took longer than 0\.3 s"):
                await probe.call(Probe.stuck)
            assert await events.until(2) == [("lost", 0), ("restored", 0)]
            assert not is_running(process)
            assert await probe.call(Probe.echo, 1) == 1

    asyncio.run(story())


def test_a_worker_that_does_not_start_is_named_and_nothing_is_left(plugin: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()

    async def story() -> None:
        async with started(tmp_path):
            pass

    with pytest.raises(WorkerError, match=rf"^{BROKEN}$") as caught:
        asyncio.run(story())
    assert (caught.value.role, caught.value.method) == ("probe", "setup")
    assert caught.value.offered_by.startswith("Probe of plugin 'isolated_probe'")


def test_the_error_of_a_worker_that_does_not_start_names_an_exception_that_its_own_processes_printed(
    plugin: ModuleType, tmp_path: Path
) -> None:
    printed = "(EngineCore pid=7) ERROR 11-27 [core.py:1510] ModuleNotFoundError: No module named 'an_engine'"
    (tmp_path / "broken").write_text(f'echo "{printed}" >&2; echo "RuntimeError: this is broken"')

    async def story() -> None:
        async with started(tmp_path):
            pass

    cause = "; it had printed: ModuleNotFoundError: No module named 'an_engine'$"
    with pytest.raises(WorkerError, match=f"^{BROKEN}{cause}") as caught:
        asyncio.run(story())
    assert (caught.value.role, caught.value.method) == ("probe", "setup")


def test_in_process_runs_isolated_workers_as_threads(plugin: ModuleType, tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path, "cluster.in_process=true") as groups:
            assert {replica.worker.echo(os.getpid()) for replica in groups["probe"].replicas} == {os.getpid()}
            assert all(replica.alive for replica in groups["probe"].replicas)
            with pytest.raises(WorkerError, match=rf"^probe\[0\]{FAILED}"):
                await groups["probe"].replicas[0].call(plugin.Probe.fail)

    asyncio.run(story())


def test_a_rank_that_does_not_start_leaves_none_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(4)\nos._exit(7)\n")
    names = ({}, {"PYTHONPATH": str(tmp_path)})
    ranks = [WorkerProcess(f"actor[0.{rank}]", variables, rank) for rank, variables in enumerate(names)]

    async def run() -> None:
        with pytest.raises(WorkerError, match=r"actor\[0\.1\]' ended: exit code 7"):
            await ProcessBody(ranks, f"file://{tmp_path}/rendezvous").start()
        assert not is_running(ranks[0].pid)
        assert {task for task in asyncio.all_tasks() if "actor" in task.get_name()} == set()

    asyncio.run(run())
