"""The controller's side of a worker in a separate child process: see `rlcore.cluster.serve` for what runs in one."""

import asyncio
import itertools
import logging
import os
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from rlcore.cluster.answers import OK, OURS, error_class
from rlcore.cluster.child import ChildProcess, PendingCall
from rlcore.cluster.child_main import WHERE
from rlcore.cluster.environment import inherited, start_message
from rlcore.cluster.rank_answers import answers_of_ranks
from rlcore.cluster.rank_lines import ANSWER_S, RankLine, difference, line_of
from rlcore.cluster.serve import ASIDE, BUILD, CALL, CANCEL, CLOSE, ITEM, MORE, STREAM, STREAM_ITEMS
from rlcore.cluster.shared_arrays import ArrayLink, Message
from rlcore.cluster.streams import merged
from rlcore.contracts.clusters import Deadlines, Shipment
from rlcore.errors import ChildError, RlcoreError, WorkerError, boundary

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 34
"""Batches are large; the limit only prevents waiting for a broken frame."""
START_S = 60.0
"""Timeout for the process to start and answer; a worker's imports are part of its setup."""


class WorkerProcess(ChildProcess):
    """One process that serves workers."""

    def __init__(self, name: str, environment: Mapping[str, str], rank: int) -> None:
        self._link, self._their_end = ArrayLink.pair()
        descriptors = (self._their_end.fileno(),)
        super().__init__(name, 1, MAX_MESSAGE_BYTES, {**inherited(None), **environment}, descriptors)
        self._rank = rank
        self._items: dict[int, asyncio.Queue[Any]] = {}
        self._questions = itertools.count(WHERE)

    async def start(self) -> None:
        """Spawn it; WorkerError when that fails."""
        reference = "rlcore.cluster.serve:ServedHost"
        start = start_message(self.name, reference, (*self._descriptors, self._rank), 1, MAX_MESSAGE_BYTES)
        await self.begin(self.spawn(), start, START_S)

    async def spawn(self) -> None:
        """See `ChildProcess.spawn`."""
        spawned = False
        try:
            await super().spawn()
            spawned = True
        finally:
            self._their_end.close()
            if not spawned:
                self._link.close()

    def abandon(self, reason: str) -> None:
        """Kill it without closing its workers."""
        self._kill(reason)

    async def _reap(self) -> None:
        await super()._reap()
        self._link.close()

    async def request(self, message: Message, where: str, deadline_s: float) -> Any:
        """The answer to a message. WorkerError naming `where` if the process ends or the deadline passes; the latter
        also kills the process, whose loop may be stuck."""
        number, call = self._open(message, where, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                await self._drained()
                return await call.future
        except TimeoutError:
            self._kill(f"{where} took longer than {deadline_s:g} s")
            raise WorkerError(f"{where} took longer than {deadline_s:g} s; its process was killed") from None
        except asyncio.CancelledError:
            self._post(number, pickle.dumps((CANCEL,)))
            raise
        finally:
            self._forget(number, call)

    async def items(self, message: Message, where: str, close_s: float) -> AsyncGenerator[Any, None]:
        """The items of a stream; closing it early ends the worker's generator, which is waited for up to `close_s`."""
        number, call = self._open(message, where, float("inf"))
        queue = self._items[number] = asyncio.Queue()
        taken = 0
        try:
            await self._drained()
            while not (call.future.done() and queue.empty()):
                for result in await arrived(queue, call.future):
                    taken += 1
                    if taken % (STREAM_ITEMS // 2) == 0:
                        self._post(number, pickle.dumps((MORE, STREAM_ITEMS // 2)))
                    yield result
            await call.future
        finally:
            if not call.future.done():
                self._post(number, pickle.dumps((CANCEL,)))
                await asyncio.wait({call.future}, timeout=close_s)
            del self._items[number]
            self._forget(number, call)

    async def line(self) -> RankLine:
        """The line at which its main thread is; a process that is stopped does not answer."""
        where = RankLine(self.pid, os.uname().nodename)
        if not self.alive:
            return where
        number, answer = next(self._questions), asyncio.get_running_loop().create_future()
        call = self._calls[number] = PendingCall(answer, float("inf"), float("inf"), "")
        try:
            self._post(number, b"")
            async with asyncio.timeout(ANSWER_S):
                return RankLine(where.pid, where.host, line_of(await answer))
        except (TimeoutError, RlcoreError):
            return where
        finally:
            self._forget(number, call)

    def _open(self, message: Message, where: str, deadline_s: float) -> tuple[int, PendingCall]:
        if not self.alive:
            raise WorkerError(f"{where}: {self.why_ended()}")
        number, call = self._expect(deadline_s, where)
        self._post(number, self._link.sent(message))
        return number, call

    def _read(self, payload: bytes) -> Any:
        return self._link.loads(payload)  # from a plugin's worker class, which is trusted, see SECURITY.md

    def _settle(self, number: int, call: PendingCall, kind: str, value: Any) -> None:
        if kind == ITEM and number in self._items:
            self._items[number].put_nowait(value)
        elif kind == OK:
            call.future.set_result(value)
        elif kind == OURS:
            name, message, *trace = value
            error = error_class(name, WorkerError)(message)
            error.__cause__ = ChildError(message, trace[0]) if trace and trace[0] else None
            if trace:
                logger.debug("%s", trace[0])
            call.future.set_exception(error)
        else:
            call.future.set_exception(WorkerError(f"{call.where}: {value[0]}"))


async def arrived(queue: "asyncio.Queue[Any]", done: "asyncio.Future[Any]") -> list[Any]:
    """The queue's next item, or nothing if `done` comes first."""
    if not queue.empty():
        return [queue.get_nowait()]
    getter = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait({getter, done}, return_when=asyncio.FIRST_COMPLETED)
        return [getter.result()] if getter.done() else []
    finally:
        getter.cancel()


class ProcessBody:
    """The processes of one replica on this machine. Implements `rlcore.contracts.clusters.ReplicaBody`."""

    def __init__(self, processes: Sequence[WorkerProcess], rendezvous: str = "") -> None:
        self.rendezvous = rendezvous
        self._processes = tuple(processes)

    @property
    def alive(self) -> bool:
        """False if any rank has ended."""
        return all(process.alive for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Ids of its processes by rank."""
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Start all processes or none."""
        ready: list[WorkerProcess] = []

        async def start(process: WorkerProcess) -> None:
            await process.start()
            ready.append(process)

        try:
            async with asyncio.TaskGroup() as group:
                for process in self._processes:
                    group.create_task(start(process))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if len(ready) < len(self._processes):
                await asyncio.gather(*(process.close() for process in ready))  # the others have ended themselves

    async def build(self, ranks: Sequence[Shipment], deadline_s: float) -> None:
        """See `ReplicaBody.build`."""
        where = f"{ranks[0].name}.setup()"
        messages = [Message((BUILD, shipment)) for shipment in ranks]
        try:
            await self._all(messages, where, deadline_s)
        except WorkerError as error:
            causes = [await process.printed_cause(str(error)) for process in self._processes if process.alive]
            if cause := next(filter(None, causes), ""):
                raise WorkerError(f"{error}{cause}") from error
            raise
        except asyncio.CancelledError:  # setup() may take minutes, and nothing is lost with it
            for process in self._processes:
                process.abandon(f"{where} was cancelled")
            raise

    async def call(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        where: str,
        deadline_s: float,
        *,
        concurrent: bool = False,
    ) -> Any:
        """See `ReplicaBody.call`; large arrays are copied once for all ranks."""
        async with packed((ASIDE if concurrent else CALL, role, method, args, kwargs), where) as message:
            return (await self._all([message] * len(self._processes), where, deadline_s))[0]

    async def _all(self, messages: Sequence[Message], where: str, deadline_s: float) -> list[Any]:
        """The answers of all ranks; the first error ends the wait: the other ranks may be waiting for that one."""
        requests = [
            process.request(message, where, deadline_s)
            for process, message in zip(self._processes, messages, strict=True)
        ]
        return await answers_of_ranks(requests, lambda rank: not self._processes[rank].alive)

    async def stream(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        """See `ReplicaBody.stream`."""
        async with packed((STREAM, role, method, args, kwargs), where) as message:
            streams = [process.items(message, where, deadlines.close_s) for process in self._processes]
            async with aclosing(merged(streams)) as items:
                async for result in items:
                    yield result

    async def difference(self) -> str:
        """The ranks that do not answer or are at other lines than the rest, for a report of a call that hangs."""
        return difference(await asyncio.gather(*(process.line() for process in self._processes)))

    async def ended(self) -> str:
        """See `ReplicaBody.ended`."""
        waits = {asyncio.ensure_future(process.wait()): process for process in self._processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[done.pop()].why_ended()

    async def close(self, deadline_s: float) -> None:
        """See `ReplicaBody.close`."""
        await asyncio.gather(*(self._close(process, deadline_s) for process in self._processes))

    async def _close(self, process: WorkerProcess, deadline_s: float) -> None:
        if process.alive and not process.busy:
            try:
                for problem in await process.request(Message((CLOSE,)), f"{process.name}.close()", deadline_s):
                    logger.warning("%s", problem)
            except RlcoreError as error:
                logger.warning("%s", error)
        await process.close()


@asynccontextmanager
async def packed(value: Any, where: str) -> AsyncIterator[Message]:
    """Context with the message, whose large arrays are in shared memory; the loop keeps running while they are
    copied."""
    with boundary(f"{where}: its arguments cannot be sent", WorkerError):
        message = Message(value)
    try:
        if message.is_large:
            await asyncio.to_thread(message.share)
        yield message
    finally:
        message.close()
