"""Sends weights in buckets through shared memory (`rlcore.contracts.weight_buckets`), on one machine.

Each receiver has a block of memory with two buckets, and a thread that fills one while the other is read. A receiver
that is slow, stops halfway or dies therefore delays no other, and one that comes back gets all weights.
"""

import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping

import numpy as np
from torch import Tensor

from rlcore.contracts.weight_buckets import NUM_BUCKETS, READY, REFUSED
from rlcore.contracts.weight_stream import LENGTH_BYTES, Piece, read_exactly, send_message
from rlcore.engines.weight_server import WeightsServer, bytes_of, type_of
from rlcore.errors import WorkerError, boundary

MIB = 2**20
CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a Unix socket's peer."""


def bucket_server(bucket_mib: int) -> WeightsServer:
    """Serves processes of the same user on this machine; WorkerError if the system does not support this shared
    memory."""
    name = f"rlcore-weights-{os.getpid()}-{secrets.token_hex(4)}"
    with boundary(
        "weights: listening for processes of this machine (rollout.weight_sync=shm, Linux only)", WorkerError
    ):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"\0{name}")
        listening.listen()

    def send(connection: socket.socket, tensors: Mapping[str, Tensor]) -> None:
        if _user_of(connection) == os.getuid():
            _send_in_buckets(connection, tensors, bucket_mib)

    return WeightsServer(listening, name, send)


def _user_of(connection: socket.socket) -> int:
    """The user of the connected process; an abstract socket has no file permissions."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1])


def _send_in_buckets(connection: socket.socket, tensors: Mapping[str, Tensor], bucket_mib: int) -> None:
    """Send the memory's descriptor, then each bucket's header once it is filled; a bucket is reused after its
    confirmation."""
    size = min(bucket_mib * MIB, max(1, sum(tensor.nbytes for tensor in tensors.values())))
    try:
        file = _shared_file(NUM_BUCKETS * size)
    except OSError as error:
        reason = (
            f"{NUM_BUCKETS * size / MIB:.3g} MiB of shared memory cannot be had for a replica: {error.strerror}; lower "
            f"rollout.weights_bucket_mib={bucket_mib}, give the actor's container more memory, or choose "
            "rollout.weight_sync=tcp or disk"
        )
        connection.sendall(REFUSED)
        send_message(connection, reason.encode())
        return
    try:
        memory = np.frombuffer(mmap.mmap(file, NUM_BUCKETS * size), np.uint8).reshape(NUM_BUCKETS, size)
        socket.send_fds(connection, [READY], [file])
    finally:
        os.close(file)
    flat = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    sent = 0
    for number, pieces in enumerate(buckets_of(tensors, size)):
        if number >= NUM_BUCKETS:
            _confirmed(connection, number - NUM_BUCKETS)
        for piece in pieces:
            into = memory[number % NUM_BUCKETS, piece.offset : piece.offset + piece.num_bytes]
            into[:] = flat[piece.name][piece.begin : piece.begin + piece.num_bytes]
        send_message(connection, json.dumps([piece.fields() for piece in pieces]).encode())
        sent = number + 1
    for number in range(max(0, sent - NUM_BUCKETS), sent):
        _confirmed(connection, number)
    send_message(connection, json.dumps([]).encode())


def _shared_file(num_bytes: int) -> int:
    """An unnamed, fully allocated file in memory; OSError if there is not enough memory.

    It is not in /dev/shm, whose size, 64 MiB in many containers, therefore does not limit it.
    """
    file = os.memfd_create("rlcore-weights")
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.close(file)
        raise
    return file


def _confirmed(connection: socket.socket, number: int) -> None:
    """Wait for the confirmation that a bucket was copied; EOFError for any other reply."""
    found = int.from_bytes(read_exactly(connection, LENGTH_BYTES))
    if found != number:
        raise EOFError(f"bucket {found} was confirmed where {number} is due")


def buckets_of(tensors: Mapping[str, Tensor], size: int) -> Iterator[list[Piece]]:
    """The pieces of each bucket of `size` bytes: all tensors, in order, without gaps."""
    pieces: list[Piece] = []
    used = 0
    for name, tensor in tensors.items():
        begin, more = 0, True
        while more:  # once for an empty tensor
            if used == size:
                yield pieces
                pieces, used = [], 0
            num_bytes = min(size - used, tensor.nbytes - begin)
            pieces.append(Piece(name, type_of(tensor), list(tensor.shape), used, begin, num_bytes))
            used, begin = used + num_bytes, begin + num_bytes
            more = begin < tensor.nbytes
    if pieces:
        yield pieces
