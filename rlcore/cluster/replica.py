"""A replica whose worker runs in other processes: called by method name, watched, and restarted when it dies."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rlcore.contracts.clusters import Deadlines, ReplicaBody, Shipment
from rlcore.contracts.workers import ReplicaEvent, ReplicaHandle, Worker, is_concurrent
from rlcore.errors import RlcoreError, WorkerError, boundary
from rlcore.errors.checks.results import checked_result

W = TypeVar("W", bound=Worker)

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 30.0
"""Longest backoff before a restart; the first restart is immediate, then 1, 2, 4, ... seconds."""

STEADY_S = 600.0
"""Serving this long resets a replica's count of deaths, because a long run outlives many nodes."""

Launch = Callable[[], Awaitable[ReplicaBody]]


class ReplicaSupervisor:
    """Runs one replica with its embedded workers; `launch` creates its body, initially and after each death."""

    def __init__(self, name: str, index: int, launch: Launch, max_restarts: int, deadlines: Deadlines) -> None:
        self.name = name
        self.index = index
        self.on_event: list[Callable[[ReplicaEvent], None]] = []
        self.before_launch: list[Callable[[], Awaitable[None]]] = []
        self.before_return: list[Callable[[], Awaitable[None]]] = []
        self._launch, self._max_restarts, self._deadlines = launch, max_restarts, deadlines
        self._built: list[Callable[[str], Sequence[Shipment]]] = []
        self._body: ReplicaBody | None = None
        self._reachable = self._ready = False
        self._state = "it was not started"
        self._failure = ""
        """Reason why its last restart failed."""
        self._num_deaths = 0
        """Number of deaths that count toward `max_restarts`; -1: the next one was excused before it was counted."""
        self._served_since = 0.0
        """`time.monotonic()` of the last start or restart."""
        self._watching: asyncio.Task[None] | None = None
        self._abandoned, self._abandoned_because = asyncio.Event(), ""

    @property
    def alive(self) -> bool:
        """True when it serves calls."""
        return self._ready and self._body is not None and self._body.alive

    @property
    def body(self) -> ReplicaBody:
        """The serving processes; WorkerError if there are none."""
        if self._body is None or not self._reachable:
            raise WorkerError(f"{self.name}: {self._state}")
        return self._body

    @property
    def serving_body(self) -> ReplicaBody:
        """The body; WorkerError also while a restarted one is prepared, such as by the weights that it lacks."""
        if not self._ready:
            raise WorkerError(f"{self.name}: {self._abandoned_because or self._state}")
        return self.body

    async def start(self) -> None:
        """Launch the first body and watch it."""
        self._body = await self._launch()
        self._reachable = self._ready = True
        self._served_since = time.monotonic()
        self._state = "it is closed"
        self._watching = asyncio.create_task(self._watch(self._body), name=f"watching {self.name}")

    async def build(self, ranks: Callable[[str], Sequence[Shipment]]) -> None:
        """Create a worker in it, now and after every restart; `ranks` returns each rank's input for a given
        rendezvous."""
        self._built.append(ranks)
        await self.body.build(ranks(self.body.rendezvous), self._deadlines.setup_s)

    async def close(self) -> None:
        """End it, leaving nothing behind."""
        self._reachable = self._ready = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._body is not None:
            await self._body.close(self._deadlines.close_s)

    def excuse(self) -> None:
        """Excuse one death that a request caused: its restart does not count."""
        is_counted = self.alive or not self._reachable  # else the callers have heard of a death before `_watch`
        self._num_deaths = max(0 if is_counted else -1, self._num_deaths - 1)

    def restart(self, reason: str) -> None:
        """Give up a serving replica: its processes are ended, and it is restarted if that is allowed."""
        if self._ready:
            self._ready, self._abandoned_because = False, reason
            self._abandoned.set()

    async def _end_of(self, body: ReplicaBody) -> str:
        """The reason why a body has ended or has to end."""
        ended, abandoned = asyncio.ensure_future(body.ended()), asyncio.ensure_future(self._abandoned.wait())
        try:
            await asyncio.wait({ended, abandoned}, return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else self._abandoned_because
        finally:
            ended.cancel()
            abandoned.cancel()
            self._abandoned.clear()

    async def _watch(self, body: ReplicaBody) -> None:
        while True:
            reason = self._failure or await self._end_of(body)
            if (self._ready or self._abandoned_because) and time.monotonic() - self._served_since >= STEADY_S:
                self._num_deaths = min(0, self._num_deaths)
            self._reachable = self._ready = False
            before, self._num_deaths = self._num_deaths, self._num_deaths + 1
            left = self._max_restarts - before
            self._state = f"lost ({reason})" + ("; it is being restarted" if left > 0 else self._no_more())
            logger.warning("%s: %s", self.name, self._state)
            self._tell(ReplicaEvent("lost", self.index, self.name, reason, comes_back=left > 0))
            await body.close(self._deadlines.close_s)
            if left <= 0:
                return
            await asyncio.sleep(min(MAX_PAUSE_S, 2.0 ** (before - 1)) if before > 0 else 0.0)
            body = await self._reborn(body)

    async def _reborn(self, dead: ReplicaBody) -> ReplicaBody:
        """A new serving body, or the ended one that failed to start."""
        self._failure = ""
        try:
            with boundary(f"{self.name}: being restarted", WorkerError):
                for allow in self.before_launch:
                    await allow()
                self._body = await self._launch()
                for ranks in self._built:
                    await self._body.build(ranks(self._body.rendezvous), self._deadlines.setup_s)
                self._reachable = True
                for prepare in self.before_return:
                    async with asyncio.timeout(self._deadlines.setup_s):
                        await prepare()
            self._ready, self._abandoned_because = True, ""
            self._served_since = time.monotonic()
        except RlcoreError as error:
            self._reachable = False
            self._failure = f"its restart failed: {error}"
            failed = self._body or dead
            await failed.close(self._deadlines.close_s)
            return failed
        logger.warning("%s: restarted", self.name)
        self._tell(ReplicaEvent("restored", self.index, self.name))
        return self._body

    def _no_more(self) -> str:
        if self._max_restarts:
            return f"; it was restarted cluster.max_restarts={self._max_restarts} times and is not restarted again"
        return "; only isolated workers are restarted"

    def _tell(self, event: ReplicaEvent) -> None:
        """Call back; an error of a callback is logged, so that the task that restarts the replica continues."""
        for callback in self.on_event:
            try:
                whose = getattr(callback, "__qualname__", type(callback).__name__)
                with boundary(f"{self.name}: on_event called {whose}", WorkerError):
                    callback(event)
            except RlcoreError as error:
                logger.error("%s", error, exc_info=error.__cause__ or error)


class Replica(Generic[W]):
    """One replica of a role, as the controller sees it."""

    def __init__(self, name: str, role: str, interface: type[W], seat: ReplicaSupervisor, deadlines: Deadlines) -> None:
        self.name = name
        self.seat = seat
        self._role, self._interface, self._deadlines = role, interface, deadlines

    @property
    def alive(self) -> bool:
        """False while a dead replica has not been restarted."""
        return self.seat.alive

    def _where(self, method: Callable[..., Any]) -> str:
        return where(self.name, self._interface, method)

    def excuse(self) -> None:
        """See `rlcore.contracts.workers.ReplicaHandle.excuse`."""
        self.seat.excuse()

    def restart(self, reason: str) -> None:
        """See `rlcore.contracts.workers.ReplicaHandle.restart`."""
        self.seat.restart(reason)

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The method's result on rank 0; WorkerError naming worker, method and cause."""
        whose = self._where(method)
        call, limit_s, aside = self.seat.body.call, self._deadlines.call_s, is_concurrent(method)
        found = await call(self._role, method.__name__, args, kwargs, whose, limit_s, concurrent=aside)
        return checked_result(whose, getattr(self._interface, method.__name__), found)

    async def difference(self) -> str:
        """The ranks that do not answer or are at other lines than the rest; empty on a cluster that cannot ask."""
        ask = getattr(self.seat.body, "difference", None)
        return str(await ask()) if ask is not None else ""

    async def stream(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """The items of an async-generator method; the generator is closed with this one."""
        whose = self._where(method)
        body = self.seat.serving_body
        async with contextlib.aclosing(
            body.stream(self._role, method.__name__, args, kwargs, whose, self._deadlines)
        ) as items:
            async for result in items:
                yield result


def where(name: str, interface: type[Worker], method: Callable[..., Any]) -> str:
    """The name of a call in errors; WorkerError when the interface lacks the method."""
    if not callable(getattr(interface, method.__name__, None)):
        raise WorkerError(f"{name} is called through {interface.__name__}, which has no {method.__name__}()")
    return f"{name}.{method.__name__}()"


class ReplicaGroup(Generic[W]):
    """All replicas of a role, wherever they run."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self.replicas = tuple(replicas)

    async def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The method's result on every replica, in order; the first error is raised after all have answered."""
        calls = [replica.call(method, *args, **kwargs) for replica in self.replicas]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        """See `rlcore.contracts.workers.WorkerGroup.on_event`."""
        for seat in self._seats():
            seat.on_event.append(callback)

    def before_launch(self, allow: Callable[[ReplicaHandle[Any]], Awaitable[None]]) -> None:
        """See `rlcore.contracts.workers.WorkerGroup.before_launch`."""
        for replica in self.replicas:
            if isinstance(replica, Replica):
                replica.seat.before_launch.append(partial(allow, replica))

    def before_return(self, prepare: Callable[[ReplicaHandle[Any]], Awaitable[None]]) -> None:
        """See `rlcore.contracts.workers.WorkerGroup.before_return`."""
        for replica in self.replicas:
            if isinstance(replica, Replica):
                replica.seat.before_return.append(partial(prepare, replica))

    def _seats(self) -> list[ReplicaSupervisor]:
        return [replica.seat for replica in self.replicas if isinstance(replica, Replica)]
