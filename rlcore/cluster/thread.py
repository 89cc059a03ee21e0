"""A worker's thread with its own event loop, and the messages between that loop and the controller's."""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self

from rlcore.errors import RlcoreError, WorkerError, boundary

logger = logging.getLogger(__name__)


class WorkerThread:
    """A daemon thread with an event loop. Calls run one at a time, except while they await."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread; returns itself. Called once, before anything runs on it."""
        self._thread.start()
        return self

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

    def spawn(self, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]) -> Callable[[], None]:
        """Run a coroutine on the thread, which passes its task to `ended` at the end; returns a function that cancels
        it.

        WorkerError after close.
        """
        if self.closed:
            work.close()
            raise WorkerError(f"{self.name} is closed")
        started: list[asyncio.Task[None]] = []

        def start() -> None:
            started.append(self._loop.create_task(work))
            started[0].add_done_callback(ended)

        self._loop.call_soon_threadsafe(start)
        return lambda: self._soon(lambda: started[0].cancel())

    def _soon(self, callback: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(callback)

    async def run(self, work: Callable[[], Any], what: str, deadline_s: float) -> Any:
        """The result of `work`, called on the thread; an awaitable is awaited there.

        WorkerError after close, and when the deadline passes or the worker is closed meanwhile.
        """
        if self.closed:
            raise WorkerError(f"{self.name} is closed")
        call = _ThreadCall(work, what)
        self._loop.call_soon_threadsafe(call.begin)
        try:
            async with asyncio.timeout(deadline_s):
                return await call.answer
        except TimeoutError as cause:
            self._soon(call.cancel)
            raise WorkerError(f"{self.name}: {what} took longer than {deadline_s:g} s") from cause
        except asyncio.CancelledError:
            self._soon(call.cancel)
            task = asyncio.current_task()
            if self.closed and task is not None and not task.cancelling():
                raise WorkerError(f"{self.name}: closed during {what}") from None
            raise

    async def stop(self, deadline_s: float) -> None:
        """End the loop and the thread; one that is stuck in foreign code is left behind and named in the log."""
        if not self.closed:
            self.closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        done, _ = await asyncio.wait({asyncio.wrap_future(self._ended)}, timeout=deadline_s)
        if done:
            self._thread.join()
        else:
            logger.warning("%s: still busy %g s after it was asked to end; left behind", self.name, deadline_s)


class _ThreadCall:
    """A job for a worker's thread; its result is reported to the loop that created it.

    Most jobs end without waiting, and do not need a task there.
    """

    def __init__(self, work: Callable[[], Any], what: str) -> None:
        self._work, self._what = work, what
        self._home = asyncio.get_running_loop()
        self._task: asyncio.Future[Any] | None = None
        self.answer: asyncio.Future[Any] = self._home.create_future()

    def begin(self) -> None:
        """On the worker's loop."""
        if self.answer.done():  # abandoned before its turn
            return
        try:
            with boundary(self._what, WorkerError, BaseException):
                found = self._work()
        except RlcoreError as error:
            self._tell(None, error)
        else:
            if inspect.isawaitable(found):
                self._task = asyncio.ensure_future(found)
                self._task.add_done_callback(self._ended)
            else:
                self._tell(found, None)

    def cancel(self) -> None:
        """On the worker's loop, behind `begin`."""
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Future[Any]") -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._tell(None if error else task.result(), error)

    def _tell(self, found: Any, error: BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile, and nothing waits for it
            self._home.call_soon_threadsafe(self._take, found, error)

    def _take(self, found: Any, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.answer.cancel()
        elif error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(found)


class Handover:
    """Transfers items from a worker's loop to the loop that created it, with one wake-up for all pending items."""

    def __init__(self, limit: int) -> None:
        self.arrived = asyncio.Event()
        """Set when there may be items, or at the end."""
        self.ended: asyncio.Task[None] | None = None
        """The task that put the items, when it has ended."""
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._items: list[Any] = []
        self._room: asyncio.Future[None] | None = None
        """The future that the worker waits for while `limit` items are pending."""

    def __bool__(self) -> bool:
        return bool(self._items)

    async def put(self, item: Any) -> None:
        """Hand an item over, and wait while `limit` items have not been taken; on the worker's loop, by one task."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
            room = asyncio.get_running_loop().create_future() if len(self._items) >= self._limit else None
            self._room = room
        if first:
            self._loop.call_soon_threadsafe(self.arrived.set)
        if room is not None:
            await room

    def end(self, ended: "asyncio.Task[None]") -> None:
        """No item will follow; on the worker's loop."""
        if not ended.cancelled():
            ended.exception()  # seen here, so that asyncio does not log it as never retrieved
        self.ended = ended
        with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile, and nothing waits for it
            self._loop.call_soon_threadsafe(self.arrived.set)

    async def wait_for_end(self, timeout_s: float) -> None:
        """Return at the end or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.ended is None:
                    self.arrived.clear()
                    await self.arrived.wait()

    def take(self) -> list[Any]:
        """All items there are."""
        self.arrived.clear()
        with self._lock:
            items, self._items = self._items, []
            room, self._room = self._room, None
        if room is not None:
            with contextlib.suppress(RuntimeError):  # the worker's loop was closed meanwhile
                room.get_loop().call_soon_threadsafe(_release, room)
        return items


def _release(room: "asyncio.Future[None]") -> None:
    if not room.done():
        room.set_result(None)
