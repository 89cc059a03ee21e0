"""Weight sync in buckets through shared memory, between processes of one machine: the protocol and the receiver.

The receiver connects to a Unix socket and sends the secret of the version. It gets one block of shared memory for two
buckets, and then a header per bucket that describes its content. It copies and confirms each bucket. The sender fills
one bucket while the other is read, and neither waits for other receivers.

Socket and memory have no name in a file system, so they vanish with the processes, even after a crash.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlcore.contracts.weight_stream import EXCHANGE_S, LENGTH_BYTES, Piece, PiecesOfTensors, read_message
from rlcore.errors import WorkerError, boundary

if TYPE_CHECKING:
    from torch import Tensor

NUM_BUCKETS = 2
READY, REFUSED = b"1", b"0"
"""The sender's first byte. READY comes with the memory, REFUSED with the reason as text."""
Memory = npt.NDArray[np.uint8]


def received_in_buckets(address: str) -> Generator[tuple[str, Tensor]]:
    """Yields names and tensors, in private memory, as they arrive from SOCKET/SECRET.

    WorkerError when nothing is sent, or only a part.
    """
    name, _, secret = address.rpartition("/")
    with (
        boundary(f"weights: receiving them through shared memory from '{name}'", WorkerError),
        closing(socket.socket(socket.AF_UNIX)) as connection,
    ):
        connection.settimeout(EXCHANGE_S)
        _connect(connection, name)
        connection.sendall(secret.encode())
        memory = _memory(connection)
        put_together = PiecesOfTensors()
        for number, pieces in enumerate(_headers(connection)):
            bucket = memory[number % NUM_BUCKETS]
            whole = []
            for piece in pieces:
                put_together.place(piece).numpy()[:] = bucket[piece.offset : piece.offset + piece.num_bytes]
                if (tensor := put_together.finished(piece)) is not None:
                    whole.append((piece.name, tensor))
            connection.sendall(number.to_bytes(LENGTH_BYTES))
            yield from whole


def _connect(connection: socket.socket, name: str) -> None:
    try:
        connection.connect(f"\0{name}")
    except ConnectionRefusedError as error:
        raise WorkerError(
            "the actor's process listens on another machine or has ended; rollout.weight_sync=shm needs actor and "
            "replicas on one machine, in one network namespace; choose tcp or disk"
        ) from error


def _memory(connection: socket.socket) -> Memory:
    """(NUM_BUCKETS, bytes of a bucket) the memory that the sender fills; WorkerError with the sender's reason for a
    refusal."""
    first, files, _, _ = socket.recv_fds(connection, 1, 1)
    if first == REFUSED:
        raise WorkerError(read_message(connection).decode())
    if first != READY or len(files) != 1:
        raise EOFError("no memory came: the sender has gone, has other weights by now, or another secret")
    try:
        shared = mmap.mmap(files[0], os.fstat(files[0]).st_size, prot=mmap.PROT_READ)
    finally:
        os.close(files[0])
    return np.frombuffer(shared, np.uint8).reshape(NUM_BUCKETS, -1)


def _headers(connection: socket.socket) -> Iterator[list[Piece]]:
    """The pieces of each bucket, up to the empty header that ends them."""
    while fields := json.loads(read_message(connection)):
        yield [Piece(*field) for field in fields]
