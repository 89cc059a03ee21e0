"""Shared parts of the protocols that carry weights from the actor's process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EXCHANGE_S = 60.0
"""Idle timeout of a connection in seconds, for both sides."""
LENGTH_BYTES = 8
"""Size of the number that precedes a message, which is JSON with names, types and shapes."""


def read_exactly(connection: socket.socket, num: int) -> bytearray:
    """Exactly `num` bytes of a connection; EOFError when it ends earlier."""
    data = bytearray(num)
    rest = memoryview(data)
    while rest:
        try:
            count = connection.recv_into(rest)
        except ConnectionResetError:  # it was closed with bytes unread
            count = 0
        if not count:
            missing = f"{len(rest)} of {num} bytes are missing"
            raise EOFError(f"{missing}: the sender has gone, has other weights by now, or another secret")
        rest = rest[count:]
    return data


def framed(message: bytes) -> bytes:
    """The message, preceded by its length."""
    return len(message).to_bytes(LENGTH_BYTES) + message


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send the message, preceded by its length."""
    connection.sendall(framed(message))


def read_message(connection: socket.socket) -> bytes:
    """The message that the other side sent with `send_message`."""
    return bytes(read_exactly(connection, int.from_bytes(read_exactly(connection, LENGTH_BYTES))))


def tensors_from(connection: socket.socket) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors, in host memory, as they arrive: names, types and shapes first, then all bytes."""
    import torch

    for name, dtype, shape in json.loads(read_message(connection)):
        form = getattr(torch, dtype)
        data = read_exactly(connection, prod(shape) * form.itemsize)
        yield name, torch.frombuffer(data, dtype=form).view(shape) if data else torch.empty(shape, dtype=form)


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor in a bucket; a tensor that is larger than a bucket has several, in order."""

    name: str
    dtype: str
    """torch's name of the tensor's type."""
    shape: list[int]
    offset: int
    """Offset of the bytes in their bucket."""
    begin: int
    """Offset of the bytes in their tensor."""
    num_bytes: int

    def fields(self) -> list[Any]:
        """All fields in order, for a header."""
        return [self.name, self.dtype, self.shape, self.offset, self.begin, self.num_bytes]


def headers(connection: socket.socket) -> Iterator[list[Piece]]:
    """The pieces of each bucket, up to the empty header that ends them."""
    while fields := json.loads(read_message(connection)):
        yield [Piece(*field) for field in fields]


class PiecesOfTensors:
    """Assembles tensors from their pieces, which come in order."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._unfinished: Tensor | None = None

    def place(self, piece: Piece) -> Tensor:
        """The private memory for the bytes of a piece."""
        import torch

        if piece.begin == 0 or self._unfinished is None:
            self._unfinished = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=self._device)
        return self._unfinished.reshape(-1).view(torch.uint8)[piece.begin : piece.begin + piece.num_bytes]

    def finished(self, piece: Piece) -> Tensor | None:
        """The complete tensor if this is its last piece, else None."""
        tensor = self._unfinished
        return tensor if tensor is not None and piece.begin + piece.num_bytes == tensor.nbytes else None
