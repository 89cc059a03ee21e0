"""Unix sockets on which a process serves weights to others of its user on the same machine."""

import os
import secrets
import select
import socket
import struct

from rlcore.errors import WorkerError, boundary

CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a Unix socket's peer."""


def listening_here(way: str) -> tuple[socket.socket, str]:
    """A socket that listens, and its name; WorkerError if the system has no such sockets.

    `way`: of `rollout.weight_sync`. The name is not in the file system, so it vanishes with the process.
    """
    name = f"rlcore-weights-{os.getpid()}-{secrets.token_hex(4)}"
    with boundary(
        f"weights: listening for processes of this machine (rollout.weight_sync={way}, Linux only)", WorkerError
    ):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(f"\0{name}")
        listening.listen()
    return listening, name


def is_foreign(connection: socket.socket) -> bool:
    """True if the connected process has another user; an abstract socket has no file permissions."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(found)[1]) != os.getuid()


def has_gone(connection: socket.socket) -> bool:
    """True when the receiver has disconnected, which its thread may not have noticed yet; never waits."""
    watched = select.poll()
    watched.register(connection, select.POLLIN)
    try:
        return bool(watched.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except OSError:  # it was killed with something unread
        return True
