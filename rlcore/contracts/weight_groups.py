"""Weight sync by broadcast from the actor's process to all processes of all replicas: the protocol and the receiver.

Each receiver connects over TCP. It sends the secret of the version, the number of replicas that take it, and its
current group. When all have connected, the sender keeps that group or lets them meet in a new one. So there is a group
for each generation of replicas. For each bucket, the sender then sends a header over each connection and broadcasts the
bytes.

When a connection ends, both sides leave the group at once. The remaining receivers read the rest from the copy in the
host memory of the actor's process. So does a restarted replica (`WeightsHandle.members` is 0).
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlcore.contracts.weight_stream import (
    EXCHANGE_S,
    PiecesOfTensors,
    headers,
    read_message,
    send_message,
    tensors_from,
)
from rlcore.errors import WorkerError, boundary
from rlcore.types import WeightsHandle

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

MEET_S = 60.0
"""Seconds that the sender waits for receivers after the first one, and that members of a new group wait for each
other."""
NCCL_S = 3600.0
"""NCCL's own limit of a broadcast, at which torch ends the process by default; far above the limit at which a member
leaves the group."""
LOOK_S = 0.002
"""Seconds between two checks of a broadcast in progress; connections are watched meanwhile."""
GONE = "the other end of its connection is gone"


@dataclass(frozen=True)
class Wish:
    """The first message of a receiver, after the secret."""

    members: int = 0
    """Replicas that take this version together; 0: this process takes it alone, from the copy in host memory."""
    processes: int = 1
    """Processes of each replica."""
    group: str = ""
    """The receiver's current group; empty: none."""


@dataclass(frozen=True)
class Invitation:
    """The sender's answer to receivers that take a version together."""

    group: str
    bucket_bytes: int
    port: int = 0
    """Port of the store, on the sender's host, in which members of a new group meet; 0: the group exists already."""
    rank: int = 0
    size: int = 0
    transport: str = "gloo"
    limit_s: float = math.inf
    """Most seconds that members of a new group wait for each other; the sender derives it from the deadline."""


class BroadcastGroup:
    """Processes, the first of which broadcasts. They share nothing with torch's groups of this process."""

    def __init__(
        self, name: str, transport: str, store: Any, at: str, rank: int, size: int, *, limit_s: float = math.inf
    ) -> None:
        """Meet the other members in a store; `at` is this process's address, `transport` is nccl or gloo.

        `limit_s`: no wait for the others takes longer. Raises torch's errors when a member does not come.
        """
        import torch.distributed as dist

        self.name, self.size, self._limit_s = name, size, limit_s
        meet_s = timedelta(seconds=min(MEET_S, limit_s))
        store.set_timeout(meet_s)
        classes: Any = dist  # stubs have only the classes of the installed build
        store.set(f"here/{rank}", "yes")
        store.wait([f"here/{index}" for index in range(size)], meet_s)
        if transport == "nccl":
            options = classes.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=NCCL_S)
            with _without_watchdog():
                self._group: Any = classes.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = classes.ProcessGroupGloo._Options()
            options._timeout = timedelta(seconds=min(EXCHANGE_S, limit_s))  # to leave a broadcast takes as long, too
            options._devices = [classes.ProcessGroupGloo.create_device(hostname=at)]
            self._group = classes.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, bytes_N: Tensor, look: Callable[[], None]) -> None:
        """Fill the tensor of every member with that of the first one; `look` raises when a member has gone.

        TimeoutError when the others take too long.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        work = self._group.broadcast([bytes_N], options)
        limit_s = min(EXCHANGE_S, self._limit_s)
        until = time.monotonic() + limit_s
        while not work.is_completed():
            look()
            if time.monotonic() > until:
                raise TimeoutError(f"a bucket was not broadcast within {limit_s:g} s")
        work.wait()
        if bytes_N.is_cuda:
            import torch

            torch.cuda.current_stream(bytes_N.device).synchronize()

    def abandon(self) -> None:
        """Leave the group, even during a broadcast."""
        with suppress(RuntimeError):
            self._group.abort()
        self._group = None  # also releases its threads and connections


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Context in which a process group of NCCL starts no thread that ends the process because of an error.

    `BroadcastGroup.broadcast` has a deadline, and a group that broke is left, not the process. Groups made outside are
    as they were.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def watch(connections: list[socket.socket], wait_s: float = LOOK_S) -> None:
    """Wait up to `wait_s`; EOFError when a connection has ended. Data that has arrived stays unread."""
    watched = select.poll()  # `select.select` takes no descriptor above 1023
    for connection in connections:
        watched.register(connection, select.POLLIN)
    readable = {number for number, _ in watched.poll(wait_s * 1000)}
    for connection in connections:
        if connection.fileno() in readable and not connection.recv(1, socket.MSG_PEEK):
            raise EOFError(GONE)
    if readable:
        time.sleep(wait_s)  # do not spin while a header waits for its turn


class GroupReceiver:
    """Receives versions of the weights in one process of a replica, by broadcast if other processes take them too."""

    def __init__(self, device: torch.device | str = "cpu", processes: int = 1) -> None:
        """Tensors come to `device`; the replica has `processes` processes, each with a receiver."""
        self._device, self._processes = device, processes
        self._group: BroadcastGroup | None = None

    def weights(self, handle: WeightsHandle) -> Generator[tuple[str, Tensor]]:
        """Yields the name and the tensor of each weight of kind `nccl`.

        WorkerError when they come neither by broadcast nor from the copy.
        """
        yielded = set()
        if handle.members:
            broadcast = self._broadcast(handle)
            try:
                for name, tensor in broadcast:
                    yielded.add(name)
                    yield name, tensor
                return
            except (OSError, EOFError, RuntimeError) as error:  # torch's errors are RuntimeErrors
                self.close()
                logger.warning("weights: the group that takes version %d broke: %s", handle.version, str(error))
            finally:
                broadcast.close()
        for name, tensor in taken_alone(handle.path):
            if name not in yielded:
                yield name, tensor.to(self._device)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.abandon()
            self._group = None

    def _broadcast(self, handle: WeightsHandle) -> Generator[tuple[str, Tensor]]:
        import torch

        done = False
        held = "" if self._group is None else self._group.name
        with _connected(handle.path, Wish(handle.members, self._processes, held)) as connection:
            try:
                connection.settimeout(2 * MEET_S + EXCHANGE_S)  # until all have come, or the sender stops waiting
                invitation = Invitation(**json.loads(read_message(connection)))
                connection.settimeout(EXCHANGE_S)
                group = self._joined(invitation, connection)
                on_host = invitation.transport == "gloo"
                bucket = torch.empty(
                    invitation.bucket_bytes, dtype=torch.uint8, device="cpu" if on_host else self._device
                )
                put_together = PiecesOfTensors(self._device)
                for pieces in headers(connection):
                    group.broadcast(bucket[: sum(piece.num_bytes for piece in pieces)], lambda: watch([connection]))
                    for piece in pieces:
                        put_together.place(piece).copy_(bucket[piece.offset : piece.offset + piece.num_bytes])
                        if (tensor := put_together.finished(piece)) is not None:
                            yield piece.name, tensor
                done = True
            finally:
                if not done:  # also if the caller stops early: it would not take the next bucket
                    self.close()

    def _joined(self, invitation: Invitation, connection: socket.socket) -> BroadcastGroup:
        if invitation.port:
            self.close()
            import torch.distributed

            dist: Any = torch.distributed  # its stub does not export the stores
            host = connection.getpeername()[0]
            meet_s = timedelta(seconds=min(MEET_S, invitation.limit_s))
            store = dist.TCPStore(host, invitation.port, timeout=meet_s, wait_for_workers=False)
            self._group = BroadcastGroup(
                invitation.group,
                invitation.transport,
                dist.PrefixStore(invitation.group, store),
                connection.getsockname()[0],
                invitation.rank,
                invitation.size,
                limit_s=invitation.limit_s,
            )
        if self._group is None:
            raise EOFError("the sender chose a group that this process is not in")
        return self._group


def taken_alone(address: str) -> Generator[tuple[str, Tensor]]:
    """Yields names and tensors of the copy in the host memory of the process at HOST:PORT/SECRET.

    WorkerError when nothing is sent, or not all of it.
    """
    place = address.rpartition("/")[0]
    with (
        boundary(f"weights: receiving them from {place}", WorkerError),
        _connected(address, Wish()) as connection,
    ):
        yield from tensors_from(connection)


def _connected(address: str, wish: Wish) -> socket.socket:
    place, _, secret = address.rpartition("/")
    host, _, port = place.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=EXCHANGE_S)
    connection.sendall(secret.encode())
    send_message(connection, json.dumps(vars(wish)).encode())
    return connection
