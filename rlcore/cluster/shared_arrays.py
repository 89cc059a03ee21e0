"""Messages between the controller and worker processes of one machine, with large arrays in shared memory.

A message is pickled with its arrays out of band (pickle protocol 5). Small arrays follow the pickle in the pipe. Large
ones are copied once, for all receivers, into a memfd: unnamed memory, whose descriptor is sent over a Unix socket. The
kernel frees it when no process has it open or mapped, however those processes ended, and the size of /dev/shm does not
limit it. It is sealed before it is sent, so it cannot change or shrink under a reader.

Arrays are read-only for the receiver in both cases.
"""

import fcntl
import functools
import itertools
import logging
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from rlcore.errors import WorkerError

logger = logging.getLogger(__name__)

MIN_SHARED_BYTES = 1 << 20
"""Minimum total bytes of a message's arrays to use shared memory."""
NAME = "rlcore-arrays-"
"""Prefix of this memory's name in /proc/PID/maps; the rest is the id of the process that created it."""
ALIGNMENT = 64
HEADER = struct.Struct("!QQQ")
"""Number of the shared memory (0: the arrays follow here), bytes of the pickle, number of arrays; then their bytes."""
NUMBER = struct.Struct("!Q")
WRITE_BYTES = 1 << 30
"""Linux writes at most 2 GiB per call."""


class SharedMemory:
    """Sealed memory with consecutive arrays; closed by `close`, or with the last reference to it."""

    def __init__(self, arrays: Sequence[memoryview]) -> None:
        """Copy the arrays; OSError if the system lacks memfds, memory or descriptors."""
        self.fd = os.memfd_create(f"{NAME}{os.getpid()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = weakref.finalize(self, os.close, self.fd)
        offset = 0
        for array in arrays:
            _write(self.fd, array, offset)
            offset += _aligned(array.nbytes)
        os.ftruncate(self.fd, offset)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


class Message:
    """A pickled value, and its arrays separately."""

    def __init__(self, value: Any) -> None:
        """The arrays are not copied, so they must not change before `frame` was sent for the last time."""
        buffers: list[pickle.PickleBuffer] = []
        self._pickle = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._arrays = [buffer.raw() for buffer in buffers]
        self.num_bytes = sum(_aligned(array.nbytes) for array in self._arrays)
        """Total bytes of the arrays, aligned."""
        self.memory: SharedMemory | None = None
        self._closed = False

    @property
    def is_large(self) -> bool:
        """True if `share` is worthwhile."""
        return self.num_bytes >= MIN_SHARED_BYTES

    def share(self) -> None:
        """Copy the arrays into shared memory, at a second per GB or two; does nothing if it is not available."""
        try:
            self.memory = SharedMemory(self._arrays)
        except (OSError, AttributeError) as problem:  # AttributeError: a system without memfd_create
            say_pipe(str(problem))
        if self._closed:  # meanwhile, by another thread
            self.close()

    def close(self) -> None:
        """Release the shared memory after the last send; receivers keep theirs."""
        self._closed = True
        if self.memory is not None:
            self.memory.close()

    def frame(self, number: int = 0) -> bytes:
        """The message for the pipe, without the arrays if `number` names their shared memory."""
        head = HEADER.pack(number, len(self._pickle), len(self._arrays))
        head += struct.pack(f"!{len(self._arrays)}Q", *(array.nbytes for array in self._arrays))
        parts: list[bytes | memoryview] = [head, self._pickle]
        if not number:
            parts.append(bytes(_padding(len(head) + len(self._pickle))))
            for array in self._arrays:
                parts += [array, bytes(_padding(array.nbytes))]
        return b"".join(parts)


class ArrayLink:
    """One end of the socket over which two processes exchange shared memory, and the messages that refer to it.

    Shared memory is sent before the message that names it; a message that is never read leaves its memory to be
    discarded with the next one.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._numbers = itertools.count(1)

    @classmethod
    def pair(cls) -> "tuple[ArrayLink, socket.socket]":
        """This process's end, and the other one's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def close(self) -> None:
        """Close this end; shared memory that was not received is freed."""
        self._socket.close()

    def sent(self, message: Message) -> bytes:
        """The message for the pipe, after its shared memory was sent."""
        if message.memory is None:
            return message.frame()
        number = next(self._numbers)
        try:
            socket.send_fds(self._socket, [NUMBER.pack(number)], [message.memory.fd])
        except ConnectionError:  # the other process has ended
            return b""
        except OSError as problem:
            say_pipe(str(problem))
            return message.frame()
        return message.frame(number)

    def loads(self, payload: bytes) -> Any:
        """The value of a message; WorkerError if its shared memory did not arrive."""
        if payload[:1] == b"\x80":  # a plain pickle; a header begins with 0
            return pickle.loads(payload)
        number, pickle_size, num_arrays = HEADER.unpack_from(payload)
        sizes = struct.unpack_from(f"!{num_arrays}Q", payload, HEADER.size)
        begin = HEADER.size + num_arrays * NUMBER.size
        end = begin + pickle_size
        whole = memoryview(payload)
        arrays = self._received(number, sum(map(_aligned, sizes))) if number else whole[end + _padding(end) :]
        offsets = itertools.accumulate(map(_aligned, sizes), initial=0)
        buffers = [arrays[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]
        return pickle.loads(whole[begin:end], buffers=buffers)

    def _received(self, number: int, size: int) -> memoryview:
        """Maps the shared memory of this number; discards what was sent before it."""
        found = 0
        while found < number:
            word, descriptors, _, _ = socket.recv_fds(self._socket, NUMBER.size, 1)
            found = NUMBER.unpack(word)[0] if word else number
            try:
                if found == number and descriptors:
                    return memoryview(mmap.mmap(descriptors[0], size, mmap.MAP_SHARED, mmap.PROT_READ))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        raise WorkerError("the shared memory of a message did not come; raise the limit of open files (ulimit -n)")


@functools.cache
def say_pipe(reason: str) -> None:
    """Log once why arrays go through the pipe."""
    logger.warning("arrays go through a pipe and not through shared memory, which takes longer: %s", reason)


def _write(fd: int, array: memoryview, offset: int) -> None:
    begin = 0
    while begin < array.nbytes:
        begin += os.pwrite(fd, array[begin : begin + WRITE_BYTES], offset + begin)


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _aligned(size: int) -> int:
    return size + _padding(size)
