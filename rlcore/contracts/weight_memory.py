"""Weight sync through shared memory, between processes of one machine: the protocol and the receiver.

The receiver connects to a Unix socket and sends the secret of the version. It gets the memory that holds the weights,
with a header that says where each one is, and maps it. If several ranks of the actor have a share of the weights each,
it does so for every one of them. It disconnects once it has read everything. All receivers read the same copy, at any
time and independently of each other.

Socket and memory have no name in a file system, so they vanish with the processes, even after a crash.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Generator
from contextlib import ExitStack, closing
from math import prod
from typing import TYPE_CHECKING, Any

from rlcore.contracts.weight_stream import EXCHANGE_S, read_message
from rlcore.errors import WorkerError, boundary

if TYPE_CHECKING:
    from torch import Tensor

ADDRESSES = ","
"""Separates the addresses of several ranks."""
READY = b"1"
"""The sender's first byte; the memory comes with it."""


def mapped_weights(address: str) -> Generator[tuple[str, Tensor]]:
    """Yields names and tensors in the memory at SOCKET/SECRET[,SOCKET/SECRET ...], which holds the next version later.

    WorkerError when the memory does not come.
    """
    with ExitStack() as connections:
        # All of them first: memory that is mapped remains readable when the next version is offered.
        parts = [_part(part, connections) for part in address.split(ADDRESSES)]
        for memory, fields in parts:
            for name, dtype, shape, offset, _ in fields:
                yield name, _tensor(memory, dtype, shape, offset)


def _part(address: str, connections: ExitStack) -> tuple[mmap.mmap, list[Any]]:
    """The memory at SOCKET/SECRET, and what it holds; connected while `connections` are."""
    name, _, secret = address.rpartition("/")
    with boundary(f"weights: receiving them through shared memory from '{name}'", WorkerError):
        connection = connections.enter_context(closing(socket.socket(socket.AF_UNIX)))
        connection.settimeout(EXCHANGE_S)
        connect_here(connection, name, "shm")
        connection.sendall(secret.encode())
        file = received_file(connection)
        try:
            fields = json.loads(read_message(connection))
            return _mapped(file, max((end for *_, end in fields), default=0)), fields
        finally:
            os.close(file)


def connect_here(connection: socket.socket, name: str, way: str) -> None:
    """Connect to a socket of this machine; WorkerError if no process listens there. `way`: of `rollout.weight_sync`."""
    try:
        connection.connect(f"\0{name}")
    except ConnectionRefusedError as error:
        raise WorkerError(
            f"the actor's process listens on another machine or has ended; rollout.weight_sync={way} needs actor and "
            "replicas on one machine, in one network namespace; choose tcp or disk"
        ) from error


def received_file(connection: socket.socket) -> int:
    """The descriptor of memory that the other side shares; EOFError when none comes."""
    first, files, _, _ = socket.recv_fds(connection, 1, 1)
    if first != READY or len(files) != 1:
        raise EOFError("no memory came: the sender has gone, has other weights by now, or another secret")
    return files[0]


def _mapped(file: int, size: int) -> mmap.mmap:
    """The memory up to this size. What is written into it here remains private."""
    if not size:
        return mmap.mmap(-1, 1)
    return mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> Tensor:
    """The tensor at an offset, a view of the memory."""
    import torch

    form, count = getattr(torch, dtype), prod(shape)
    if not count:
        return torch.empty(shape, dtype=form)
    return torch.frombuffer(memory, dtype=form, count=count, offset=offset).view(shape)
