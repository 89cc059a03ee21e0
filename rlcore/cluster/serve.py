"""Serves a worker in its own process under the local cluster: `rlcore.cluster.child_main` serves one `ServedHost`.

A message is a tuple, sent through `rlcore.cluster.shared_arrays`: (BUILD, shipment), (CALL | ASIDE | STREAM, role,
method, args, kwargs) or (CLOSE,). ASIDE calls a method that is marked with `rlcore.contracts.workers.concurrent`. An
answer is one of `rlcore.cluster.child_main`; a stream's items come before it. With the number of a running call,
(CANCEL,) ends it and (MORE, n) acknowledges n items of its stream.
"""

import asyncio
import os
import queue
import socket
import threading
from functools import partial
from typing import Any

from rlcore.cluster.answers import OK, OURS
from rlcore.cluster.child_main import Pipe
from rlcore.cluster.host import WorkerHost
from rlcore.cluster.shared_arrays import ArrayLink, Message
from rlcore.errors import RlcoreError, WorkerError, boundary, trace_of
from rlcore.errors.redaction import beginning

BUILD, CALL, ASIDE, STREAM = "build", "call", "aside", "stream"
CLOSE, CANCEL, MORE = "close", "cancel", "more"
ITEM = "item"
"""Kind of answer: an item of a stream."""
STREAM_ITEMS = 64
"""Unacknowledged items of a stream after which the worker waits for the controller."""


class ServedHost:
    """Serves the workers of this process over its pipe."""

    def __init__(self, arrays_fd: int, rank: int) -> None:
        """`arrays_fd`: this end of the socket that transfers shared memory.

        The answer to a call is that of rank 0; other ranks only report completion or an error.
        """
        os.set_inheritable(arrays_fd, False)
        self._link = ArrayLink(socket.socket(fileno=arrays_fd))
        self._answers_calls = rank == 0
        self._host = WorkerHost()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._room: dict[int, asyncio.Semaphore] = {}

    def serve_calls(self, pipe: Pipe, calls: "queue.SimpleQueue[tuple[int, bytes] | None]") -> None:
        """Serve until the pipe ends, on the loop of this, the main, thread. Answers are whatever pickles."""
        pipe.dumps = self._dumps
        asyncio.run(self._serve(pipe, calls))

    async def _serve(self, pipe: Pipe, calls: "queue.SimpleQueue[tuple[int, bytes] | None]") -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[int, tuple[Any, ...]] | None] = asyncio.Queue()

        def feed() -> None:
            while (call := calls.get()) is not None:
                message = self._read(pipe, *call)
                if message is not None:
                    loop.call_soon_threadsafe(inbox.put_nowait, (call[0], message))
            loop.call_soon_threadsafe(inbox.put_nowait, None)

        threading.Thread(target=feed, name="feed", daemon=True).start()
        while (call := await inbox.get()) is not None:
            self._receive(pipe, *call)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._host.close()

    def _read(self, pipe: Pipe, number: int, payload: bytes) -> tuple[Any, ...] | None:
        """The message for the loop; None for one that is answered without it, even while the loop computes."""
        try:
            with boundary("the arguments cannot be read in the worker's process", WorkerError):
                message: tuple[Any, ...] = self._link.loads(payload)
        except WorkerError as error:
            pipe.answer(number, OURS, _error_fields(error))
            return None
        kind, *rest = message
        if kind != ASIDE:
            return message
        work = partial(asyncio.run, self._answer(pipe, number, CALL, rest))
        threading.Thread(target=work, name=f"call {number}", daemon=True).start()
        return None

    def _dumps(self, answer: tuple[str, Any]) -> bytes:
        """Items of a stream are sent through the pipe, because each one in shared memory would keep a descriptor
        open."""
        message = Message(answer)
        if message.is_large and answer[0] != ITEM:
            message.share()
        try:
            return self._link.sent(message)
        finally:
            message.close()

    def _receive(self, pipe: Pipe, number: int, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == CANCEL:
            if number in self._tasks:
                self._tasks[number].cancel()
        elif kind == MORE:
            for _ in range(rest[0] if number in self._room else 0):
                self._room[number].release()
        else:
            task = asyncio.create_task(self._answer(pipe, number, kind, rest))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, pipe: Pipe, number: int, kind: str, rest: list[Any]) -> None:
        try:
            with boundary("the worker's process", WorkerError):
                value = await self._run(pipe, number, kind, rest)
        except RlcoreError as error:
            pipe.answer(number, OURS, _error_fields(error))
        except asyncio.CancelledError:
            pipe.answer(number, OURS, ("WorkerError", "cancelled", ""))
        else:
            pipe.answer(number, OK, value)

    async def _run(self, pipe: Pipe, number: int, kind: str, rest: list[Any]) -> Any:
        if kind == BUILD:
            return self._host.build(*rest)
        if kind == CLOSE:
            return self._host.close()
        if kind == CALL:
            value = await self._host.call(*rest)
            return value if self._answers_calls else None
        room = self._room[number] = asyncio.Semaphore(STREAM_ITEMS)
        items = self._host.stream(*rest)
        try:
            async for result in items:
                await room.acquire()
                pipe.answer(number, ITEM, result)
        finally:
            await items.aclose()
            del self._room[number]
        return None


def _error_fields(error: RlcoreError) -> tuple[str, str, str]:
    """Class, message and traceback of a worker's error."""
    return type(error).__name__, beginning(str(error)), trace_of(error.__cause__ or error)
