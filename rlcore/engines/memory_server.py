"""Serves the trainer's weights to processes of this machine, which map the memory that holds them.

The protocol is that of `rlcore.contracts.weight_memory`. A version is copied once, whatever the number of receivers. It
goes into the memory of the version before, whose pages exist already; that is several times as fast as new memory. If
a receiver is still connected, the version goes into new memory instead, so none reads two versions.
"""

import json
import mmap
import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.contracts.weight_memory import READY
from rlcore.contracts.weight_stream import send_message
from rlcore.engines.local_sockets import has_gone, is_foreign, listening_here
from rlcore.engines.weight_server import WeightsServer, type_of
from rlcore.errors import WorkerError, boundary

MIB = 2**20
FIRST_BYTES = MIB
"""The first step in which a file grows, unless a tensor needs more; each further step doubles it."""
ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple, whatever its type."""


def memory_server() -> WeightsServer["SharedVersion"]:
    """Serves processes of the same user on this machine; WorkerError if the system does not support this shared
    memory."""
    listening, name = listening_here("shm")
    copies = SharedCopies()
    return WeightsServer(listening, name, copies.copied, copies.send, copies.close)


class WeightsMemory:
    """A file in memory, with a place for each tensor of a version.

    The file grows in few steps, because Python keeps a descriptor for each mapping. Only the places take memory: what
    a step leaves behind is a hole. The size of /dev/shm, 64 MiB in many containers, does not limit it.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("rlcore-weights")
        self.version: SharedVersion | None = None
        """The version that it holds; None while one is written."""
        self.receivers: set[socket.socket] = set()
        self._size = 0
        self._free = torch.empty(0, dtype=torch.uint8)
        """The end of the file, which has no tensor yet, and no memory."""
        self._places: dict[str, tuple[int, Tensor]] = {}

    def place(self, name: str, num_bytes: int) -> tuple[int, Tensor]:
        """The offset and the memory for a tensor: the same for every version. OSError if there is not enough memory."""
        found = self._places.get(name)
        if found is None or found[1].nbytes != num_bytes:
            found = self._places[name] = self._new_place(num_bytes)
        return found

    def _new_place(self, num_bytes: int) -> tuple[int, Tensor]:
        aligned = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if aligned > self._free.nbytes:
            self._grow(aligned)
        offset, place = self._size - self._free.nbytes, self._free[:num_bytes]
        if num_bytes:
            os.posix_fallocate(self.file, offset, num_bytes)
        self._free = self._free[aligned:]
        return offset, place

    def _grow(self, num_bytes: int) -> None:
        size = max(num_bytes, FIRST_BYTES, self._size)
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.file, self._size + size)
        self._free = torch.frombuffer(mmap.mmap(self.file, size, offset=self._size), dtype=torch.uint8)
        self._size += size

    def close(self) -> None:
        """Release it; receivers keep what they have mapped."""
        os.close(self.file)


@dataclass(frozen=True, eq=False)
class SharedVersion:
    """One version of the weights in shared memory."""

    memory: WeightsMemory
    fields: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """(name, type, shape, begin, end) of each tensor."""


class SharedCopies:
    """Copies versions into shared memory, and lends it to receivers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: WeightsMemory | None = None

    def copied(self, tensors: Iterable[tuple[str, Tensor]]) -> SharedVersion:
        """A version with these tensors; the one before cannot be sent any more. WorkerError if memory is exhausted."""
        with boundary("weights: a file in memory for a copy (rollout.weight_sync=shm)", WorkerError):
            memory = self._writable()
        fields = []
        for name, tensor in tensors:
            try:
                offset, bytes_N = memory.place(name, tensor.nbytes)
            except OSError as error:
                raise WorkerError(
                    f"weights: {tensor.nbytes / MIB:.3g} MiB of shared memory cannot be had for {name}: "
                    f"{error.strerror}; give the actor's container more memory, or choose rollout.weight_sync=disk"
                ) from error
            bytes_N.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            fields.append((name, type_of(tensor), tuple(tensor.shape), offset, offset + tensor.nbytes))
        version = SharedVersion(memory, tuple(fields))
        with self._lock:
            memory.version = version
        return version

    def send(self, connection: socket.socket, version: SharedVersion) -> None:
        """Lend a receiver the memory until it disconnects."""
        memory = version.memory
        if is_foreign(connection):
            return
        with self._lock:
            if memory.version is not version:
                return
            socket.send_fds(connection, [READY], [memory.file])
            memory.receivers.add(connection)
        try:
            send_message(connection, json.dumps(version.fields).encode())
            connection.settimeout(None)  # a receiver takes its time, and rollout.weights_deadline_s limits it
            connection.recv(1)
        finally:
            with self._lock:
                memory.receivers.discard(connection)

    def close(self) -> None:
        """Release the memory."""
        with self._lock:
            if self._memory is not None:
                self._memory.version = None
                self._memory.close()
                self._memory = None

    def _writable(self) -> WeightsMemory:
        """Memory that no receiver has; its version cannot be sent any more."""
        with self._lock:
            before = self._memory
            if before is not None:
                before.version = None
                if all(map(has_gone, before.receivers)):
                    return before
                before.close()
            self._memory = WeightsMemory()
            return self._memory
