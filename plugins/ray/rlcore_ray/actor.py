"""Runs the workers of one rank in an actor."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray

from rlcore.aio import in_daemon_thread
from rlcore.cluster.kit import WorkerHost, frames_of, line_of
from rlcore.contracts.clusters import Shipment
from rlcore.errors import RlcoreError, WorkerError, boundary, trace_of
from rlcore.errors.redaction import beginning
from rlcore_ray.sealed import Sealed

OK, ITEMS, FAILED, CROSSING = "ok", "items", "failed", "crossing"
Answer = tuple[str, Any]
"""(OK, sealed value), (ITEMS, list of sealed items), (FAILED, (class of the error, message, traceback)), or (CROSSING,
reason why the arguments cannot be read or the result cannot be sent)."""
CANCELLED: Answer = (FAILED, ("WorkerError", "cancelled", ""))
MAX_CALLS = 10_000
"""Calls that an actor serves at a time; further ones wait."""
ASIDE = "aside"
"""The concurrency group of Ray in which `ActorHost.line` and `call_aside` are called. Each group has a separate loop
and thread, so this one answers while the workers' thread computes or waits."""
STREAM_BATCH = 64
"""Most stream items per message; items already yielded do not wait for more."""
END_OF_OUTPUT = "rlcore: end of output"
"""The last line that an actor prints to stdout and stderr; after it the collector has all lines."""


def interface_of(address: str) -> str:
    """The network interface with this address; empty if there is none.

    Gloo needs it where the host's name resolves to 127.0.0.1 or 127.0.1.1, as on Debian. Without it, gloo listens
    at that address, and ranks of other nodes cannot connect.
    """
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(has.address == address for has in addresses)), "")


class CrossingError(RlcoreError):
    """Arguments that cannot be read, or a result that cannot be sent; an error of a worker keeps its class."""


class ActorHost:
    """The workers of one actor. Calls are numbered, so that they can be cancelled by number."""

    def __init__(self, path: Sequence[str], directory: str) -> None:
        """`path` and `directory` are the controller's; relative paths of the configuration start there."""
        self._directory = directory
        here = [entry for entry in path if Path(entry).exists()]
        # The order is the controller's, too: of two packages with one name, both processes import the same one.
        sys.path[:] = here + [entry for entry in sys.path if entry not in here]
        address = ray.util.get_node_ip_address()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address))
        self._host = WorkerHost(address)
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._cancelled: set[int] = set()
        """Calls that were cancelled before their turn, also those that have not arrived."""
        self._next = 0
        self._thread = 0
        """The thread in which the workers compute."""

    async def address(self) -> tuple[str, int, int]:
        """This node's address, a free port on it, and the id of this process."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1]), os.getpid()

    async def devices(self) -> list[str]:
        """The devices that Ray has given to this actor, as CUDA_VISIBLE_DEVICES names them."""
        return [str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    async def use_devices(self, devices: Sequence[str]) -> None:
        """Compute on devices that other actors have reserved; called before `build`, which imports torch."""
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)

    async def build(self, shipment: Shipment) -> Answer:
        """Create a worker and set it up."""
        return await _answered(lambda: self._build(shipment))

    async def line(self) -> str:
        """The line at which the workers' thread is."""
        return line_of(frames_of(self._thread))

    async def _build(self, shipment: Shipment) -> None:
        loops = threading.current_thread()
        if not self._thread and loops is not threading.main_thread():  # the process ends with its main thread anyway
            threading.Thread(target=_end_with, args=(loops,), name="end", daemon=True).start()
        self._thread = threading.get_ident()
        try:
            os.chdir(self._directory)
        except OSError as cause:
            raise WorkerError(
                f"{shipment.name}: node {os.uname().nodename} has no directory '{self._directory}', from which the run "
                "was started; start it from one that all nodes share"
            ) from cause
        self._host.build(shipment)

    async def call(
        self,
        number: int,
        role: str,
        method: str,
        arguments: Sealed,
        with_result: bool = True,
    ) -> Answer:
        """The result of the method with these `arguments`; None unless `with_result`."""
        if not await self._turn(number):
            return CANCELLED
        task = self._tasks[number] = asyncio.ensure_future(self._call(role, method, arguments))
        try:
            return await _answered(lambda: task, with_result)
        finally:
            del self._tasks[number]

    async def _call(self, role: str, method: str, arguments: Sealed) -> Any:
        return await self._host.call(role, method, *_read(arguments))

    async def call_aside(self, role: str, method: str, arguments: Sealed, with_result: bool = True) -> Answer:
        """`call` on a separate thread and without a turn, for methods marked as `concurrent`."""

        def work() -> Any:
            return asyncio.run(self._call(role, method, arguments))

        return await _answered(lambda: in_daemon_thread(method, work), with_result)

    async def stream(self, number: int, role: str, method: str, arguments: Sealed) -> AsyncIterator[Answer]:
        """Lists of the items that arrived since the last list, possibly followed by an error."""
        queue: asyncio.Queue[Any] = asyncio.Queue(STREAM_BATCH)

        async def pump() -> None:
            items = self._host.stream(role, method, *_read(arguments))
            try:
                async for result in items:
                    await queue.put(_sent(result))
            finally:
                await items.aclose()

        if not await self._turn(number):
            yield CANCELLED
            return
        task = self._tasks[number] = asyncio.ensure_future(pump())
        try:
            while not (task.done() and queue.empty()):
                yield ITEMS, await _batch(queue, task)
            kind, value = await _answered(lambda: task)
            if kind != OK:
                yield kind, value
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del self._tasks[number]

    async def _turn(self, number: int) -> bool:
        """Return in the order of the numbers: ranks must begin collective work in the same order.

        False when the call was cancelled while it waited, or before it arrived.
        """
        if number >= self._next:
            turn = self._waiting[number] = asyncio.get_running_loop().create_future()
            self._call_next()
            await turn
            del self._waiting[number]
            self._next += 1
            self._call_next()
        if number in self._cancelled:
            self._cancelled.discard(number)
            return False
        return True

    def _call_next(self) -> None:
        """Give the next call its turn. Skips cancelled calls that have not arrived: they may never arrive, because Ray
        itself answers a call whose arguments are lost."""
        while self._next in self._cancelled and self._next not in self._waiting:
            self._next += 1
        turn = self._waiting.get(self._next)
        if turn is not None and not turn.done():
            turn.set_result(None)

    async def cancel(self, number: int) -> None:
        """End a call or stream that is running, waits for its turn, or has not arrived."""
        if number in self._tasks:
            self._tasks[number].cancel()
        elif number >= self._next:
            self._cancelled.add(number)
            self._call_next()

    async def close(self) -> list[str]:
        """Close the workers. Returns descriptions of errors."""
        problems = self._host.close()
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.write(descriptor, f"{END_OF_OUTPUT}\n".encode())
        return problems

    async def watch(self) -> None:
        """Never return: this call ends with the actor."""
        await asyncio.Event().wait()


def _end_with(thread: threading.Thread) -> None:
    """End the process with the thread of its loop, which a sys.exit() in a task ends: calls would wait for hours."""
    thread.join()
    os.write(2, b"rlcore: the event loop has ended, such as by sys.exit() in a task\n")
    os._exit(1)


async def _answered(work: Callable[[], Awaitable[Any]], with_result: bool = True) -> Answer:
    """The result or error of the work as a value, because Ray would wrap the exception."""
    try:
        with boundary("the worker's actor", WorkerError):
            value = await work()
        return OK, _sent(value if with_result else None)
    except CrossingError as error:
        return CROSSING, beginning(str(error))
    except RlcoreError as error:
        return FAILED, (type(error).__name__, beginning(str(error)), trace_of(error.__cause__ or error))
    except asyncio.CancelledError:
        return CANCELLED


def _read(arguments: Sealed) -> Any:
    """The arguments and keyword arguments of a call."""
    with boundary("the arguments cannot be read in the worker's process", CrossingError):
        return arguments.opened()


def _sent(value: Any) -> Sealed:
    """The value for the controller."""
    with boundary("the result cannot be sent to the parent", CrossingError):
        return Sealed(value)


async def _batch(queue: "asyncio.Queue[Any]", task: "asyncio.Future[None]") -> list[Any]:
    """The available items, after waiting for the first one or the end."""
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
