"""Workers as threads of this process: one thread with an event loop for each, shared by those served inside it."""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlcore.errors import RlcoreError, WorkerError, boundary
from rlcore.plan import RunPlan, WorkerPlan
from rlcore.workers import Worker, WorkerContext

W = TypeVar("W", bound=Worker)
R = TypeVar("R")

logger = logging.getLogger(__name__)

STREAM_ITEMS = 64
"""Items of a stream that wait for the controller before the worker waits for it."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds that the controller waits for a worker before it gives up, by what it waits for."""

    setup_s: float = 1800.0
    call_s: float = 21600.0
    close_s: float = 10.0


class WorkerThread:
    """A daemon thread with an event loop. What runs on it runs one at a time, but for what awaits."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._let_tasks_end())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
            self._ended.set_result(None)

    async def _let_tasks_end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    def submit(self, work: Coroutine[Any, Any, R]) -> "Future[R]":
        """Run a coroutine on the thread; WorkerError after close."""
        if self.closed:
            work.close()
            raise WorkerError(f"{self.name} is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, R], what: str, deadline_s: float) -> R:
        """The coroutine's result; WorkerError when the deadline passes or the worker is closed meanwhile."""
        future = self.submit(work)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as cause:
            raise WorkerError(f"{self.name}: {what} took longer than {deadline_s:g} s") from cause
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed and task is not None and not task.cancelling():
                raise WorkerError(f"{self.name}: closed during {what}") from None
            raise

    async def stop(self, deadline_s: float) -> None:
        """End the loop and the thread; one that is stuck in somebody's code is left behind and named in the log."""
        if not self.closed:
            self.closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        done, _ = await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=deadline_s)
        if done:
            self._thread.join()
        else:
            logger.warning("%s: still busy %g s after it was asked to end; left behind", self.name, deadline_s)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """What a worker raises becomes a WorkerError that says where; an RlcoreError keeps its class."""
    try:
        with boundary(where, WorkerError):
            yield
    except SystemExit as cause:
        raise WorkerError(f"{where}: it called sys.exit({cause.code!r})") from cause
    except RlcoreError as error:
        if str(error).startswith(f"{where}: "):
            raise
        raise type(error)(f"{where}: {error}") from error


class LocalReplica(Generic[W]):
    """A worker on its thread, as the controller sees it."""

    def __init__(self, worker: W, interface: type[W], thread: WorkerThread, name: str, deadlines: Deadlines) -> None:
        self.name = name
        self.worker = worker
        self.thread = thread
        self._interface = interface
        self._deadlines = deadlines

    def _where(self, method: Callable[..., Any]) -> str:
        name = method.__name__
        if not callable(getattr(self._interface, name, None)):
            raise WorkerError(f"{self.name} is called through {self._interface.__name__}, which has no {name}()")
        return f"{self.name}.{name}()"

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The method's result; WorkerError naming worker, method and cause."""
        where = self._where(method)

        async def work() -> Any:
            with _named(where):
                result = getattr(self.worker, method.__name__)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

        return await self.thread.run(work(), where, self._deadlines.call_s)

    async def stream(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items of an async-generator method; the generator is closed with this one, wherever that happens."""
        where = self._where(method)
        controller = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue(STREAM_ITEMS)
        ended: Future[None] = Future()

        async def pump() -> None:
            try:
                with _named(where):
                    async with contextlib.aclosing(getattr(self.worker, method.__name__)(*args, **kwargs)) as items:
                        async for item in items:
                            put = asyncio.run_coroutine_threadsafe(queue.put(item), controller)
                            await asyncio.wrap_future(put)
            finally:
                ended.set_result(None)

        pumping = self.thread.submit(pump())
        done = asyncio.wrap_future(pumping)
        try:
            while not (done.done() and queue.empty()):
                for item in await _arrived(queue, done):
                    yield item
            if done.cancelled():
                raise WorkerError(f"{self.name}: closed during {where}")
            await done
        finally:
            if not done.done():
                pumping.cancel()
                await asyncio.wait({asyncio.wrap_future(ended)}, timeout=self._deadlines.close_s)
            if done.done() and not done.cancelled():
                done.exception()  # seen here, so that nobody logs it as never retrieved


async def _arrived(queue: "asyncio.Queue[Any]", done: "asyncio.Future[None]") -> list[Any]:
    """The queue's next item, or nothing if `done` comes first."""
    if not queue.empty():
        return [queue.get_nowait()]
    getter = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait({getter, done}, return_when=asyncio.FIRST_COMPLETED)
        return [getter.result()] if getter.done() else []
    finally:
        getter.cancel()


class LocalGroup(Generic[W]):
    """All replicas of a role."""

    def __init__(self, replicas: Sequence[LocalReplica[W]]) -> None:
        self.replicas = tuple(replicas)

    async def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The method's result on every replica, in order; all are waited for before the first error is raised."""
        calls = [replica.call(method, *args, **kwargs) for replica in self.replicas]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class LocalCluster:
    """Starts the workers of a plan in this process, and ends those it started."""

    def __init__(self, plan: RunPlan, run_dir: Path, deadlines: Deadlines) -> None:
        self._plan, self._run_dir, self._deadlines = plan, run_dir, deadlines
        self._started: list[LocalReplica[Any]] = []
        self._threads: list[WorkerThread] = []

    async def start(self, plan: WorkerPlan) -> LocalGroup[Any]:
        """The replicas of one role, set up; WorkerError naming the one that failed."""
        return LocalGroup([await self._start(plan, index) for index in range(plan.request.replicas)])

    async def _start(self, plan: WorkerPlan, index: int) -> LocalReplica[Any]:
        role, inside = plan.request.role, plan.request.inside
        name = f"{role.name}[{index}]"
        host = next((each for each in self._started if inside and each.name == f"{inside.name}[{index}]"), None)
        if host is None:
            self._threads.append(WorkerThread(name))
        thread = host.thread if host else self._threads[-1]
        context = self._context(plan, index, host.worker if host else None)

        async def build() -> Worker:
            with _named(f"{name}.setup()"):
                worker = plan.cls(context)
                self._started.append(LocalReplica(worker, role.interface, thread, name, self._deadlines))
                worker.setup()
                return worker

        await thread.run(build(), "setup()", self._deadlines.setup_s)
        return self._started[-1]

    def _context(self, plan: WorkerPlan, index: int, host: Worker | None) -> WorkerContext:
        request, config = plan.request, self._plan.config
        return WorkerContext(
            role=request.role.name,
            replica=index,
            rank=0,
            num_ranks=request.ranks,
            config=config,
            section=plan.section,
            references=dict(request.references),
            run_dir=self._run_dir,
            seed=config.train.seed,
            threads=request.threads or config.cluster.threads or self._plan.facts.cpus,
            device=host.context.device if host else self._device(plan, index),
            host=host,
        )

    def _device(self, plan: WorkerPlan, index: int) -> str:
        gpus = next(pool.gpus for pool in self._plan.pools if pool.name == plan.request.pool)
        if not gpus or not plan.request.gpus:
            return "cpu"
        return f"cuda:{gpus[index * ceil(plan.request.gpus) % len(gpus)]}"

    async def close(self) -> None:
        """Close every worker, the last one first, and end its thread."""
        for replica in reversed(self._started):
            if replica.thread.closed:
                continue
            where = f"{replica.name}.close()"

            async def work(replica: LocalReplica[Any] = replica, where: str = where) -> None:
                with _named(where):
                    replica.worker.close()

            try:
                await replica.thread.run(work(), where, self._deadlines.close_s)
            except WorkerError as error:
                logger.warning("%s", error)
        for thread in reversed(self._threads):
            await thread.stop(self._deadlines.close_s)
        self._started.clear()
        self._threads.clear()
