"""What runs in an actor, and the controller's side of a replica made of actors."""

import asyncio
import logging
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

import rlcore.errors
from rlcore.child import OK, OURS
from rlcore.cluster.deadlines import Deadlines
from rlcore.cluster.host import Shipment, WorkerHost
from rlcore.cluster.ranks import answers_of_ranks
from rlcore.cluster.streams import merged
from rlcore.errors import ChildError, RlcoreError, WorkerError, boundary, describe

logger = logging.getLogger(__name__)

Answer = tuple[str, Any]
"""(OK, value), or (OURS, (class of the error, message, traceback))."""
CANCELLED: Answer = (OURS, ("WorkerError", "cancelled", ""))
LOOPBACK = "127.0.0.1"
"""The address of nodes of a Ray that is this machine's alone."""
MAX_CALLS = 10_000
"""Calls that an actor serves at a time; more wait."""
LAST_WORD_S = 30.0
"""How long Ray may take to say why an actor that cannot be reached has ended: it asks nodes every few seconds."""
ASK_AGAIN_S = 0.5
STREAM_BATCH = 64
"""Items of a stream that travel together at most; what has been yielded meanwhile does not wait for more."""


class ActorHost:
    """The workers of one actor. Calls come numbered, so that they can be cancelled by number."""

    def __init__(self, path: Sequence[str], directory: str) -> None:
        """`directory` is the controller's, of which relative paths of the configuration speak."""
        self._directory = directory
        sys.path += [entry for entry in path if entry not in sys.path and Path(entry).exists()]
        self._host = WorkerHost()
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._cancelled: set[int] = set()
        """Calls that were ended before their turn."""
        self._next = 0

    async def address(self) -> tuple[str, int, int]:
        """This node's address, a port that is free on it, and the id of this process."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1]), os.getpid()

    async def build(self, shipment: Shipment) -> Answer:
        """Make a worker and set it up."""
        return await _answered(lambda: self._build(shipment))

    async def _build(self, shipment: Shipment) -> None:
        try:
            os.chdir(self._directory)
        except OSError as cause:
            raise WorkerError(
                f"{shipment.name}: node {os.uname().nodename} has no directory '{self._directory}', from which the run "
                "was started; start it from one that all nodes share"
            ) from cause
        self._host.build(shipment)

    async def call(self, number: int, role: str, method: str, given: tuple[Sequence[Any], Mapping[str, Any]]) -> Answer:
        """The method's result; `given` are its arguments."""
        if not await self._turn(number):
            return CANCELLED
        task = self._tasks[number] = asyncio.ensure_future(self._host.call(role, method, *given))
        try:
            return await _answered(lambda: task)
        finally:
            del self._tasks[number]

    async def stream(
        self, number: int, role: str, method: str, given: tuple[Sequence[Any], Mapping[str, Any]]
    ) -> AsyncIterator[Answer]:
        """Lists of the items that have come since the last list; in the end, maybe, an error."""
        queue: asyncio.Queue[Any] = asyncio.Queue(STREAM_BATCH)

        async def pump() -> None:
            items = self._host.stream(role, method, *given)
            try:
                async for item in items:
                    await queue.put(item)
            finally:
                await items.aclose()

        if not await self._turn(number):
            yield CANCELLED
            return
        task = self._tasks[number] = asyncio.ensure_future(pump())
        try:
            while not (task.done() and queue.empty()):
                yield OK, await _batch(queue, task)
            kind, value = await _answered(lambda: task)
            if kind != OK:
                yield kind, value
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._tasks[number]

    async def _turn(self, number: int) -> bool:
        """Return in the order of the numbers: ranks have to begin what they do together in one order.

        False when it was cancelled meanwhile.
        """
        self._waiting[number] = asyncio.get_running_loop().create_future()
        if self._next in self._waiting and not self._waiting[self._next].done():
            self._waiting[self._next].set_result(None)
        await self._waiting[number]
        del self._waiting[number]
        self._next += 1
        if self._next in self._waiting:
            self._waiting[self._next].set_result(None)
        if number in self._cancelled:
            self._cancelled.discard(number)
            return False
        return True

    async def cancel(self, number: int) -> None:
        """End a call or stream that is under way or waits for its turn."""
        if number in self._tasks:
            self._tasks[number].cancel()
        elif number >= self._next:
            self._cancelled.add(number)

    async def close(self) -> list[str]:
        """Close the workers; what went wrong, in words."""
        return self._host.close()

    async def watch(self) -> None:
        """Never return: the actor's end is the end of this call."""
        await asyncio.Event().wait()


async def _answered(work: Callable[[], Awaitable[Any]]) -> Answer:
    """What became of the work, so that nothing is raised through Ray, which would wrap it."""
    try:
        with boundary("the worker's actor", WorkerError):
            return OK, await work()
    except RlcoreError as error:
        trace = "".join(traceback.format_exception(error.__cause__ or error, limit=-20))
        return OURS, (type(error).__name__, str(error), trace)
    except asyncio.CancelledError:
        return CANCELLED


async def _batch(queue: "asyncio.Queue[Any]", task: "asyncio.Future[None]") -> list[Any]:
    """The items that are there, after waiting for the first one or for the end."""
    if queue.empty():
        getter = asyncio.ensure_future(queue.get())
        await asyncio.wait({getter, task}, return_when=asyncio.FIRST_COMPLETED)
        if not getter.done():
            getter.cancel()
            return []
        first = [getter.result()]
    else:
        first = []
    return first + [queue.get_nowait() for _ in range(queue.qsize())]


class ActorBody:
    """The actors of one replica, one for each rank. Implements `rlcore.cluster.replica.Body`."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self.name = name
        self.rendezvous = ""
        self._scratch = ""
        """Where ranks of one machine meet."""
        self._actors = tuple(actors)
        self._number = 0
        self._places = [""] * len(self._actors)
        self._reasons: dict[int, str] = {}
        """Why a rank has ended, in the order in which that was seen."""
        self._closed = False

    @property
    def alive(self) -> bool:
        """False once an actor is known to have ended."""
        return not self._reasons and not self._closed

    async def meet(self, deadline_s: float) -> None:
        """Wait until every actor runs; agree on where the ranks meet."""
        where = f"{self.name}: starting its actor"
        with _in_time(where, deadline_s):
            refs = [actor.address.remote() for actor in self._actors]
            addresses = await self._all(refs, self._ask, where, deadline_s)
        self._places = [f"process {process} on {host}" for host, _, process in addresses]
        if len(self._actors) > 1:
            host, port, _ = addresses[0]
            self.rendezvous = f"tcp://{host}:{port}"
            if {each for each, _, _ in addresses} == {LOOPBACK}:  # torch would listen on all interfaces
                self._scratch = tempfile.mkdtemp(prefix="rlcore-ranks-")
                self.rendezvous = f"file://{self._scratch}/meeting"

    async def build(self, ranks: Sequence[Shipment], deadline_s: float) -> None:
        """See `Body.build`."""
        where = f"{ranks[0].name}.setup()"
        refs = [actor.build.remote(shipment) for actor, shipment in zip(self._actors, ranks, strict=True)]
        await self._all(refs, self._value, where, deadline_s)

    async def call(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, deadline_s: float
    ) -> Any:
        """See `Body.call`; what all ranks are given is stored once."""
        number = self._number
        with boundary(f"{where}: its arguments cannot be sent", WorkerError):
            given: Any = (args, kwargs) if len(self._actors) == 1 else ray.put((args, kwargs))
            refs = [actor.call.remote(number, role, method, given) for actor in self._actors]
        self._number += 1  # only now: actors wait for every number in turn
        try:
            # The first error ends the wait: the other ranks may be waiting for that one.
            values = await self._all(refs, self._value, where, deadline_s)
        except BaseException:
            self._cancel(number)
            raise
        return values[0]

    async def stream(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        """See `Body.stream`."""
        number = self._number
        with boundary(f"{where}: its arguments cannot be sent", WorkerError):
            calls = [
                actor.stream.options(num_returns="streaming").remote(number, role, method, (args, kwargs))
                for actor in self._actors
            ]
        self._number += 1
        streams = [self._items(rank, refs, number, where, deadlines) for rank, refs in enumerate(calls)]
        async with aclosing(merged(streams)) as items:
            async for item in items:
                yield item

    async def _items(
        self, rank: int, refs: Any, number: int, where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        """The items of one rank's stream."""
        ended = False
        try:
            while True:
                try:
                    ref = await anext(refs)
                except StopAsyncIteration:
                    ended = True
                    return
                for item in await self._value(rank, ref, where, deadlines.call_s):
                    yield item
        except RayError as error:
            ended = True
            raise WorkerError(f"{where}: {await self._lost(rank, error)}") from error
        finally:
            if not ended:
                self._actors[rank].cancel.remote(number)
                await self._drain(refs, deadlines.close_s)

    async def _drain(self, refs: Any, close_s: float) -> None:
        """Take what still comes, so that the worker's generator has ended when this returns."""
        try:
            async with asyncio.timeout(close_s):
                async for _ in refs:
                    pass
        except (TimeoutError, RayError):
            pass

    async def _all(self, refs: Sequence[Any], ask: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """What all ranks answer; the first error ends the wait: the other ranks may be waiting for that one."""
        asked = [ask(rank, ref, *args) for rank, ref in enumerate(refs)]
        return await answers_of_ranks(asked, self._reasons.__contains__)

    async def _value(self, rank: int, ref: Any, where: str, deadline_s: float) -> Any:
        """What a worker returned; what it raised is raised here.

        WorkerError when the deadline passes, after which the actor is killed: its loop may be stuck.
        """
        try:
            return opened(await self._ask(rank, ref, where, deadline_s))
        except TimeoutError as cause:
            reason = f"{where} took longer than {deadline_s:g} s"
            self._reasons.setdefault(rank, reason)
            ray.kill(self._actors[rank])
            raise WorkerError(f"{reason}; its actor was killed") from cause

    async def _ask(self, rank: int, ref: Any, where: str, deadline_s: float) -> Any:
        """The value of a reference; TimeoutError when the deadline passes, WorkerError when the rank's actor ends."""
        try:
            async with asyncio.timeout(deadline_s):
                return await ref
        except GetTimeoutError:
            raise
        except RayError as error:
            raise WorkerError(f"{where}: {await self._lost(rank, error)}") from error

    async def _lost(self, rank: int, error: RayError) -> str:
        """Why a rank does not answer; the rest of a message of Ray is its own log."""
        error = await self._last_word(rank, error)
        if self._closed and rank not in self._reasons:
            return next(iter(self._reasons.values()), "it was closed")
        several, place = len(self._actors) > 1, self._places[rank]
        whose = f"its rank {rank}, {self.name[:-1]}.{rank}], ended" if several else "its actor ended"
        # Who is served inside another worker has that one's actor.
        where = ", ".join(each for each in ("" if several else self.name, place) if each)
        return self._reasons.setdefault(rank, f"{whose}: {describe(error).rstrip('.')}" + (where and f" ({where})"))

    async def _last_word(self, rank: int, error: RayError) -> RayError:
        """The error, or where that says only that the actor cannot be reached now, what Ray says when it knows why."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                while isinstance(error, ActorUnavailableError) and not self._closed:
                    await asyncio.sleep(ASK_AGAIN_S)
                    try:
                        await self._actors[rank].watch.remote()
                    except RayError as later:
                        error = later
        return error

    def _cancel(self, number: int) -> None:
        for actor in self._actors:
            actor.cancel.remote(number)

    async def ended(self) -> str:
        """See `Body.ended`."""
        watches = [asyncio.ensure_future(self._watch(rank)) for rank in range(len(self._actors))]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        return done.pop().result()

    async def _watch(self, rank: int) -> str:
        """Why the rank has ended, once it has."""
        try:
            await self._actors[rank].watch.remote()
        except RayError as error:
            return await self._lost(rank, error)
        return ""

    async def close(self, deadline_s: float) -> None:
        """See `Body.close`."""
        if self.alive:
            where = f"{self.name}.close()"
            try:
                with _in_time(where, deadline_s):
                    refs = [actor.close.remote() for actor in self._actors]
                    for problems in await self._all(refs, self._ask, where, deadline_s):
                        for problem in problems:
                            logger.warning("%s", problem)
            except RlcoreError as error:
                logger.warning("%s", error)
        self.kill()

    def kill(self) -> None:
        """End the actors at once."""
        self._closed = True
        for actor in self._actors:
            ray.kill(actor)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


@contextmanager
def _in_time(where: str, deadline_s: float) -> Iterator[None]:
    """A deadline that passes inside becomes a WorkerError that says what took so long."""
    try:
        yield
    except TimeoutError as cause:
        raise WorkerError(f"{where} took longer than {deadline_s:g} s") from cause


def opened(answer: Answer) -> Any:
    """The value of an answer; what the worker raised is raised here, with the worker's traceback as its cause."""
    kind, value = answer
    if kind == OK:
        return value
    name, message, trace = value
    known: type[RlcoreError] = getattr(rlcore.errors, name, WorkerError)
    raise known(message) from ChildError(message, trace)
