"""Parts of the protocols by which weights come from the actor's process."""

import socket

EXCHANGE_S = 60.0
"""Idle timeout of a connection in seconds, for both sides."""
LENGTH_BYTES = 8
"""Size of the number that precedes the JSON with names, types and shapes."""


def read_exactly(connection: socket.socket, num: int) -> bytearray:
    """Exactly `num` bytes of a connection; EOFError when it ends before."""
    data = bytearray(num)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError(f"{len(rest)} of {num} bytes are missing: the sender has gone, or has other weights by now")
        rest = rest[count:]
    return data
