"""Runs workers on threads of this process, each with an event loop; embedded workers share their host's."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from rlcore.aio import in_daemon_thread
from rlcore.cluster.host import named
from rlcore.cluster.replica import where
from rlcore.cluster.serve import STREAM_ITEMS
from rlcore.cluster.thread import Handover, WorkerThread
from rlcore.cluster.worker_context import context_of
from rlcore.contracts.clusters import ClusterContext, Deadlines, WorkerPlan
from rlcore.contracts.workers import Worker, WorkerContext, is_concurrent
from rlcore.errors import WorkerError, worker_call
from rlcore.errors.checks.results import as_stream, checked_result
from rlcore.imports import collecting_rarely

W = TypeVar("W", bound=Worker)

logger = logging.getLogger(__name__)


class ThreadReplica(Generic[W]):
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
            with named(whose, self.worker.context):
                found = getattr(self.worker, method.__name__)(*args, **kwargs)
            return _awaited(found, whose, self.worker.context) if inspect.isawaitable(found) else found

        if is_concurrent(method):
            found = await self._aside(work, whose)
        else:
            found = await self.thread.run(work, whose, self._deadlines.call_s)
        return checked_result(whose, getattr(self._interface, method.__name__), found)

    async def _aside(self, work: Callable[[], Any], whose: str) -> Any:
        """The result of an async method, on a separate thread with an event loop."""
        if self.thread.closed:
            raise WorkerError(f"{self.name} is closed")
        limit_s = self._deadlines.call_s
        try:
            async with asyncio.timeout(limit_s):
                return await in_daemon_thread(whose, lambda: asyncio.run(work()))
        except TimeoutError as cause:
            raise WorkerError(f"{self.name}: {whose} took longer than {limit_s:g} s") from cause

    def excuse(self) -> None:
        """See `rlcore.contracts.workers.ReplicaHandle.excuse`: a worker of this process does not die alone."""

    def restart(self, reason: str) -> None:
        """WorkerError: a worker of this process cannot be ended."""
        raise WorkerError(f"{self.name}: {reason}; it is a thread of this process, which cannot be restarted")

    async def stream(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items of an async-generator method; the generator is closed with this one, wherever that happens."""
        whose = self._where(method)
        handover = Handover(STREAM_ITEMS)

        async def pump() -> None:
            with named(whose, self.worker.context):
                found = getattr(self.worker, method.__name__)(*args, **kwargs)
                async with contextlib.aclosing(as_stream(whose, found, WorkerError)) as items:
                    async for value in items:
                        await handover.put(value)

        cancel = self.thread.spawn(pump(), handover.end)
        try:
            while handover.ended is None or handover:
                await handover.arrived.wait()
                for value in handover.take():
                    yield value
            if handover.ended.cancelled():
                raise WorkerError(f"{self.name}: closed during {whose}")
            handover.ended.result()
        finally:
            if handover.ended is None:
                cancel()
                await handover.wait_for_end(self._deadlines.close_s)


async def _awaited(found: Awaitable[Any], whose: str, context: WorkerContext) -> Any:
    with named(whose, context):
        return await found


class ThreadWorkers:
    """Starts workers on threads, and ends them."""

    def __init__(self, context: ClusterContext) -> None:
        self._context = context
        self._started: list[ThreadReplica[Any]] = []
        self._threads: list[WorkerThread] = []

    async def start(self, worker: WorkerPlan, index: int, device: str) -> ThreadReplica[Any]:
        """One replica of one rank, set up; an embedded one on the thread of its host. `device`: 'cpu', or 'cuda:3'."""
        role, embedded_in = worker.request.role, worker.request.embedded_in
        name = f"{role.name}[{index}]"
        hosts = [worker for worker in self._started if embedded_in and worker.name == f"{embedded_in.name}[{index}]"]
        host = hosts[0] if hosts else None
        thread = host.thread if host else self._new_thread(name)
        context = context_of(self._context, worker, index, device=device, host=host.worker if host else None)
        deadlines = self._context.deadlines

        def build() -> ThreadReplica[Any]:
            with collecting_rarely(), named(f"{name}.setup()", context):
                built = worker.cls(context)
                replica = ThreadReplica(built, role.interface, thread, name, deadlines)
                self._started.append(replica)
                built.setup()
                return replica

        with worker_call(role.name, "setup", worker.offered_by):
            replica: ThreadReplica[Any] = await thread.run(build, "setup()", deadlines.setup_s)
        return replica

    def _new_thread(self, name: str) -> WorkerThread:
        self._threads.append(thread := WorkerThread(name).start())
        return thread

    async def close(self) -> None:
        """Close every worker, last one first, and end its thread; errors are logged."""
        close_s = self._context.deadlines.close_s
        for replica in reversed(self._started):
            if replica.thread.closed:
                continue
            whose = f"{replica.name}.close()"

            def close(replica: ThreadReplica[Any] = replica, whose: str = whose) -> None:
                with named(whose):
                    replica.worker.close()

            try:
                await replica.thread.run(close, whose, close_s)
            except WorkerError as error:
                logger.warning("%s", error)
        for thread in reversed(self._threads):
            await thread.stop(close_s)
        self._started.clear()
        self._threads.clear()
