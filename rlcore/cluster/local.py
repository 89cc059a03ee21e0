"""Workers on this machine: a thread with an event loop for each, or processes of their own.

A worker that asks to be isolated, or has several ranks, runs in child processes; any other in a thread of this process.
Those served inside a worker share its thread or process.
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlcore.checks.results import as_stream, checked_result
from rlcore.cluster.deadlines import Deadlines
from rlcore.cluster.host import Shipment, named, pack, thread_environment
from rlcore.cluster.process import ProcessBody, WorkerProcess, first_error
from rlcore.cluster.replica import Replica, ReplicaGroup, ReplicaSupervisor, where
from rlcore.cluster.serve import STREAM_ITEMS
from rlcore.cluster.thread import Handover, WorkerThread
from rlcore.cluster.worker_context import context_of, devices_of, threads_of
from rlcore.contracts.workers import Worker
from rlcore.errors import WorkerError
from rlcore.plan import RunPlan, WorkerPlan

W = TypeVar("W", bound=Worker)

logger = logging.getLogger(__name__)


class LocalReplica(Generic[W]):
    """A worker on its thread, as the controller sees it."""

    def __init__(self, worker: W, interface: type[W], thread: WorkerThread, name: str, deadlines: Deadlines) -> None:
        self.name = name
        self.worker = worker
        self.thread = thread
        self._interface = interface
        self._deadlines = deadlines

    @property
    def alive(self) -> bool:
        """A worker of this process lives until it is closed."""
        return not self.thread.closed

    def _where(self, method: Callable[..., Any]) -> str:
        return where(self.name, self._interface, method)

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The method's result; WorkerError naming worker, method and cause."""
        whose = self._where(method)

        def work() -> Any:
            with named(whose):
                found = getattr(self.worker, method.__name__)(*args, **kwargs)
            return _awaited(found, whose) if inspect.isawaitable(found) else found

        found = await self.thread.run(work, whose, self._deadlines.call_s)
        return checked_result(whose, getattr(self._interface, method.__name__), found)

    async def stream(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items of an async-generator method; the generator is closed with this one, wherever that happens."""
        whose = self._where(method)
        handover = Handover(STREAM_ITEMS)

        async def pump() -> None:
            with named(whose):
                found = getattr(self.worker, method.__name__)(*args, **kwargs)
                async with contextlib.aclosing(as_stream(whose, found, WorkerError)) as items:
                    async for item in items:
                        await handover.put(item)

        cancel = self.thread.spawn(pump(), handover.end)
        try:
            while handover.ended is None or handover:
                await handover.arrived.wait()
                for item in handover.take():
                    yield item
            if handover.ended.cancelled():
                raise WorkerError(f"{self.name}: closed during {whose}")
            handover.ended.result()
        finally:
            if handover.ended is None:
                cancel()
                await handover.wait_for_end(self._deadlines.close_s)


async def _awaited(found: Awaitable[Any], whose: str) -> Any:
    with named(whose):
        return await found


class LocalCluster:
    """Starts the workers of a plan on this machine, and ends those it started."""

    def __init__(self, plan: RunPlan, run_dir: Path, deadlines: Deadlines) -> None:
        self._plan, self._run_dir, self._deadlines = plan, run_dir, deadlines
        self._started: list[LocalReplica[Any]] = []
        self._threads: list[WorkerThread] = []
        self._seats: dict[str, ReplicaSupervisor] = {}
        self._scratch = ""
        self._numbers = itertools.count()

    async def open(self) -> None:
        """Everything is here already."""

    async def start(self, plan: WorkerPlan) -> ReplicaGroup[Any]:
        """The replicas of one role, set up; WorkerError naming the one that failed."""
        indices = range(plan.request.replicas)
        if self._in_processes(plan):
            return ReplicaGroup(await first_error([self._start_process(plan, index) for index in indices]))
        return ReplicaGroup([await self._start_thread(plan, index) for index in indices])

    def _in_processes(self, plan: WorkerPlan) -> bool:
        request = plan.request
        if request.embedded_in is not None:
            return f"{request.embedded_in.name}[0]" in self._seats
        return request.ranks > 1 or (request.isolated and not self._plan.config.cluster.in_process)

    async def _start_process(self, plan: WorkerPlan, index: int) -> Replica[Any]:
        role, inside = plan.request.role, plan.request.embedded_in
        name = f"{role.name}[{index}]"
        seat = self._seats.get(f"{inside.name}[{index}]") if inside else None
        if seat is None:
            restarts = self._plan.config.cluster.max_restarts if plan.request.isolated else 0

            async def launch() -> ProcessBody:
                return await self._launch(plan, index)

            seat = self._seats[name] = ReplicaSupervisor(name, index, launch, restarts, self._deadlines)
            await seat.start()

        def ranks(rendezvous: str) -> list[Shipment]:
            return [self._shipment(name, plan, index, rank, rendezvous) for rank in range(plan.request.ranks)]

        await seat.build(ranks)
        return Replica(name, role.name, role.interface, seat, self._deadlines)

    def _shipment(self, name: str, plan: WorkerPlan, index: int, rank: int, rendezvous: str) -> Shipment:
        # The process sees its own devices only, so they begin with 0 there.
        device = "cuda:0" if self._devices(plan, index, rank) else "cpu"
        context = context_of(plan, self._plan, self._run_dir, index, device=device, rank=rank, rendezvous=rendezvous)
        return pack(name, plan, context, self._plan)

    def _devices(self, plan: WorkerPlan, index: int, rank: int = 0) -> tuple[int, ...]:
        """Of the host, when it is served inside another."""
        inside = plan.request.embedded_in
        where = next(each for each in self._plan.workers if each.request.role == inside) if inside else plan
        return devices_of(where, self._plan, index, rank)

    async def _launch(self, plan: WorkerPlan, index: int) -> ProcessBody:
        """The processes of a replica, with nothing in them yet."""
        ranks = plan.request.ranks
        processes = []
        for rank in range(ranks):
            environment = thread_environment(threads_of(plan, self._plan))
            devices = self._devices(plan, index, rank)
            if devices:
                environment["CUDA_VISIBLE_DEVICES"] = visible(devices)
            if ranks > 1:
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            name = f"{plan.request.role.name}[{index}.{rank}]" if ranks > 1 else f"{plan.request.role.name}[{index}]"
            processes.append(WorkerProcess(name, environment))
        body = ProcessBody(processes, self._rendezvous() if ranks > 1 else "")
        await body.start()
        return body

    def _rendezvous(self) -> str:
        self._scratch = self._scratch or tempfile.mkdtemp(prefix="rlcore-ranks-")
        return f"file://{self._scratch}/{next(self._numbers)}"

    async def _start_thread(self, plan: WorkerPlan, index: int) -> LocalReplica[Any]:
        role, inside = plan.request.role, plan.request.embedded_in
        name = f"{role.name}[{index}]"
        host = next((each for each in self._started if inside and each.name == f"{inside.name}[{index}]"), None)
        if host is None:
            self._threads.append(WorkerThread(name))
        thread = host.thread if host else self._threads[-1]
        devices = self._devices(plan, index)
        device = f"cuda:{devices[0]}" if devices else "cpu"
        context = context_of(plan, self._plan, self._run_dir, index, device=device, host=host.worker if host else None)

        def build() -> None:
            with named(f"{name}.setup()"):
                worker = plan.cls(context)
                self._started.append(LocalReplica(worker, role.interface, thread, name, self._deadlines))
                worker.setup()

        await thread.run(build, "setup()", self._deadlines.setup_s)
        return self._started[-1]

    async def close(self) -> None:
        """Close every worker, the last one first, and end its thread or processes."""
        await asyncio.gather(*(seat.close() for seat in self._seats.values()))
        for replica in reversed(self._started):
            if replica.thread.closed:
                continue
            whose = f"{replica.name}.close()"

            def work(replica: LocalReplica[Any] = replica, whose: str = whose) -> None:
                with named(whose):
                    replica.worker.close()

            try:
                await replica.thread.run(work, whose, self._deadlines.close_s)
            except WorkerError as error:
                logger.warning("%s", error)
        for thread in reversed(self._threads):
            await thread.stop(self._deadlines.close_s)
        self._started.clear()
        self._threads.clear()
        self._seats.clear()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


def visible(devices: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that may use these of the devices that this one sees."""
    ours = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return ",".join(ours[each] if each < len(ours) else str(each) for each in devices)
