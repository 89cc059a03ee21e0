"""Sends weights to the processes on this process's device (`rlcore.contracts.weight_ipc`).

The receivers connect on threads of the server. The weights are sent on the thread that calls `IpcServer.send`, which
all ranks of the actor do at the same time because they gather the weights together.
"""

import json
import math
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlcore.contracts.weight_groups import Wish
from rlcore.contracts.weight_ipc import AT, COPIED, device_name, shared_on_device, wait_for_copies
from rlcore.contracts.weight_memory import READY
from rlcore.contracts.weight_stream import Piece, read_message, send_message
from rlcore.engines.local_sockets import has_gone, is_foreign, listening_here
from rlcore.engines.weight_buckets import packed
from rlcore.engines.weight_server import WeightsServer

CLOSED = b""
"""The end of a connection: its receiver has everything and has released the bucket."""
LOOK_S = 0.05
"""Seconds between two checks for receivers that have come or gone."""
MIB = 2**20
Exchange = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""Returns the values of all ranks, each of which calls it with its value."""


@dataclass(eq=False)
class Receiver:
    """A process that waits for a version, or is receiving it."""

    connection: socket.socket
    wish: Wish
    has_all: threading.Event = field(default_factory=threading.Event)
    """Set when it has everything, or gets no more."""


class Bucket:
    """Memory of this process's device that receivers map."""

    def __init__(self, num_bytes: int, device: str) -> None:
        self._file: int | None = None
        if torch.device(device).type == "cpu":
            self._file = os.memfd_create("rlcore-weights")
            os.ftruncate(self._file, num_bytes)
            self.bytes_N = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        else:
            with mappable():
                self.bytes_N = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def share(self, connection: socket.socket) -> None:
        """Let a receiver map it."""
        if self._file is None:
            send_message(connection, json.dumps(shared_on_device(self.bytes_N)).encode())
            return
        send_message(connection, json.dumps(len(self.bytes_N)).encode())
        socket.send_fds(connection, [READY], [self._file])

    def close(self) -> None:
        """Release it; receivers keep what they have mapped."""
        if self._file is not None:
            os.close(self._file)
        else:
            cuda: Any = torch.cuda
            cuda.ipc_collect()  # frees earlier buckets that a receiver released late


@contextmanager
def mappable() -> Iterator[None]:
    """Context in which torch allocates device memory that other processes can map, whatever its settings.

    A container may forbid pidfd_getfd, and then no other process can map expandable segments (pytorch#165685).
    """
    allocator: Any = torch._C  # torch has these two under no public name
    before: str = allocator._accelerator_getAllocatorSettings()
    changed = before.replace("expandable_segments:True", "expandable_segments:False")
    if changed == before:
        yield
        return
    allocator._accelerator_setAllocatorSettings(changed)
    try:
        yield
    finally:
        allocator._accelerator_setAllocatorSettings(before)


class IpcServer:
    """The receivers on this rank's device, and the bucket that goes to them."""

    def __init__(self, device: str, bucket_mib: int, deadline_s: float = math.inf) -> None:
        """A receiver has `deadline_s` for a version: no wait for one takes more than a quarter of that, so that the
        others still get it in time. WorkerError when it cannot listen.
        """
        self._device, self._bucket_bytes, self._limit_s = device, bucket_mib * MIB, deadline_s / 4
        self._changed = threading.Condition()
        self._waiting: list[Receiver] = []
        """Those of the current version."""
        listening, name = listening_here("ipc")
        place = f"{device_name(device)}{AT}{name}"
        self._server = WeightsServer[list[Receiver]](listening, place, lambda _: self._none_waiting(), self._serve)

    def offer(self) -> str:
        """The address of a new version; `send` sends its weights, any number of times."""
        return self._server.offer(())

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def send(self, members: int, tensors: Iterable[tuple[str, Tensor]], exchange: Exchange | None = None) -> None:
        """Send these tensors to all processes of that many replicas on this rank's device, and only to those that are
        there within the limit.

        All ranks call this, each with all tensors. `exchange`: None without other ranks. A receiver that has gone, or
        confirms no bucket within the limit, is left behind.
        """
        receivers = self._met(members, exchange)
        if not receivers:
            for _ in tensors:  # gathering needs all ranks
                pass
            return
        bucket = Bucket(self._bucket_bytes, self._device)
        try:
            receivers = self._reached(receivers, lambda receiver: bucket.share(receiver.connection))
            for pieces, _ in packed(tensors, bucket.bytes_N):
                wait_for_copies(bucket.bytes_N)
                receivers = self._confirmed(self._announced(receivers, pieces), COPIED)
            self._confirmed(self._announced(receivers, []), CLOSED)
        finally:
            for receiver in receivers:
                receiver.has_all.set()
            bucket.close()

    def _none_waiting(self) -> list[Receiver]:
        """The receivers of a new version; those that still wait for an earlier one get nothing."""
        with self._changed:
            for receiver in self._waiting:
                receiver.has_all.set()
            self._waiting = []
            return self._waiting

    def _serve(self, connection: socket.socket, waiting: list[Receiver]) -> None:
        """Keep a receiver's connection until it has everything, or goes while it waits."""
        if is_foreign(connection):
            return
        receiver = Receiver(connection, Wish(**json.loads(read_message(connection))))
        with self._changed:
            if waiting is not self._waiting:
                return
            waiting.append(receiver)
            self._changed.notify_all()
        while not receiver.has_all.wait(LOOK_S):
            with self._changed:
                if receiver in waiting and has_gone(connection):
                    waiting.remove(receiver)
                    return

    def _met(self, members: int, exchange: Exchange | None) -> list[Receiver]:
        """The receivers on this device, when all of all devices have come or the limit has passed."""
        until = time.monotonic() + self._limit_s
        while True:
            with self._changed:
                here = list(self._waiting)
            found = {
                "receivers": len(here),
                "processes": max((receiver.wish.processes for receiver in here), default=0),
                "is_late": time.monotonic() > until,
            }
            ranks = [found] if exchange is None else exchange(found)
            expected = members * max(rank["processes"] for rank in ranks)
            if 0 < expected <= sum(rank["receivers"] for rank in ranks) or any(rank["is_late"] for rank in ranks):
                break
            with self._changed:
                if len(self._waiting) == len(here):
                    self._changed.wait(LOOK_S)
        with self._changed:
            for receiver in here:
                if receiver in self._waiting:
                    self._waiting.remove(receiver)
        return here

    def _announced(self, receivers: Sequence[Receiver], pieces: Sequence[Piece]) -> list[Receiver]:
        """Those that got the header of a bucket."""
        header = json.dumps([piece.fields() for piece in pieces]).encode()
        return self._reached(receivers, lambda receiver: send_message(receiver.connection, header))

    def _confirmed(self, receivers: Sequence[Receiver], answer: bytes) -> list[Receiver]:
        """Those that answer within the limit that they have copied the bucket, or have released it."""
        until = time.monotonic() + self._limit_s
        return self._reached(receivers, lambda receiver: _wait_for(answer, receiver.connection, until))

    def _reached(self, receivers: Sequence[Receiver], reach: Callable[[Receiver], None]) -> list[Receiver]:
        """The receivers for which a step succeeds; the others get nothing more."""
        there = []
        for receiver in receivers:
            try:
                reach(receiver)
            except (OSError, EOFError):
                with suppress(OSError):
                    receiver.connection.shutdown(socket.SHUT_RDWR)
                receiver.has_all.set()
            else:
                there.append(receiver)
        return there


def _wait_for(answer: bytes, connection: socket.socket, until: float) -> None:
    """Read a receiver's answer; EOFError when it does not come in time."""
    watched = select.poll()
    watched.register(connection, select.POLLIN)
    left_s = max(0.0, until - time.monotonic())
    if not watched.poll(None if math.isinf(left_s) else left_s * 1000) or connection.recv(1) != answer:
        raise EOFError("a receiver did not confirm a bucket")
