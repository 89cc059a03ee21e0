"""Serves the trainer's weights to engines in other processes.

The process keeps a copy of the last offered weights in host memory and gives it to callers with the address, at any
time. Updates do not wait for that, and an engine that comes back during one gets the same weights as the others. The
address is valid for one version and contains a secret, so nothing else can fetch them; the transfer is not encrypted.
"""

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.contracts.weight_stream import EXCHANGE_S, read_exactly, send_message
from rlcore.errors import WorkerError, boundary, describe

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that `close` waits for each thread; one that is inside of a library that cannot be left ends with the
process."""

RETRY_S = 0.2
"""Seconds after a connection that could not be accepted."""

PIECE_BYTES = 16 << 20
"""Each piece of this size has to be sent within EXCHANGE_S."""
SECRET_BYTES = 16


C = TypeVar("C")
Tensors = Iterable[tuple[str, Tensor]]
"""Names and tensors on any device, each valid until the next one."""


@dataclass(frozen=True, eq=False)
class _Offered(Generic[C]):
    """The copy of one version of the weights, with the secret that its receivers have to present."""

    copy: C
    secret: str = field(default_factory=lambda: secrets.token_hex(SECRET_BYTES))


class WeightsServer(Generic[C]):
    """Gives receivers the last offered weights, on separate threads."""

    def __init__(
        self,
        listening: socket.socket,
        place: str,
        copied: Callable[[Tensors], C],
        send: Callable[[socket.socket, C], None],
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve a listening socket; `place` is its address for receivers.

        `copied` makes the copy of a version in host memory. `send` gives it to a receiver that presented the secret;
        OSError or EOFError if that disconnected. `closed` is called at the end.
        """
        self._listening, self._place, self._on_closed = listening, place, closed
        self._copied, self._send = copied, send
        self._offered: _Offered[C] | None = None
        self._closed = self._stranger_is_logged = self._refusal_is_logged = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="weights", daemon=True)]
        self._threads[0].start()

    def offer(self, tensors: Tensors) -> str:
        """Copy these weights and offer them instead of earlier ones; their address."""
        self._offered = None  # its memory is free for this version, and replicas that come back wait for it
        self._offered = _Offered(self._copied(tensors))
        return f"{self._place}/{self._offered.secret}"

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._closed, self._offered = True, None
            for connection in (self._listening, *self._open):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # which wakes the threads
            self._listening.close()
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._on_closed()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if self._closed:  # which is set before the socket is shut down
                    return
                self._log_refusal(error)
                time.sleep(RETRY_S)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._open.add(connection)
                serving = threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True)
                self._threads = [*filter(threading.Thread.is_alive, self._threads), serving]
                serving.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(EXCHANGE_S)
                peer_secret, offered = read_exactly(connection, 2 * SECRET_BYTES), self._offered
                if offered is None:
                    return
                if not hmac.compare_digest(bytes(peer_secret), offered.secret.encode()):
                    self._log_stranger(connection)
                    return
                self._send(connection, offered.copy)
        except (OSError, EOFError) as error:  # the engine has gone, which is reported elsewhere
            logger.info("weights: a replica that took them is gone: %s", error)
        finally:
            with self._lock:
                self._open.discard(connection)

    def _log_refusal(self, error: OSError) -> None:
        """Log the first connection that could not be accepted, such as for lack of file descriptors."""
        if not self._refusal_is_logged:
            self._refusal_is_logged = True
            logger.warning(
                "weights: a replica could not be accepted: %s; it is tried again every %g s, others are not reported",
                describe(error),
                RETRY_S,
            )

    def _log_stranger(self, connection: socket.socket) -> None:
        """Log the first wrong secret; a stranger that tries many should not fill the log."""
        if not self._stranger_is_logged:
            self._stranger_is_logged = True
            peer = connection.getpeername()
            who = f"a process at {peer[0]}" if isinstance(peer, tuple) else "a process of this machine"
            logger.warning(
                "weights: %s asked for them with a wrong secret and got nothing; it is not a replica of this run, or "
                "one that took too long for its version; others are not reported",
                who,
            )


def tcp_server(host: str) -> WeightsServer[dict[str, Tensor]]:
    """Serves receivers on any machine (`rlcore.contracts.weights.received`); WorkerError when it cannot listen."""
    with boundary(f"weights: listening on {host}", WorkerError):
        listening = socket.create_server((host, 0))
    return WeightsServer(listening, f"{host}:{listening.getsockname()[1]}", host_copies, send_whole)


def send_whole(connection: socket.socket, tensors: Mapping[str, Tensor]) -> None:
    """Name, type and shape of each tensor, then their bytes."""
    parts = [(name, type_of(tensor), list(tensor.shape)) for name, tensor in tensors.items()]
    send_message(connection, json.dumps(parts).encode())
    for tensor in tensors.values():
        data = bytes_of(tensor).data
        for begin in range(0, len(data), PIECE_BYTES):  # a socket's timeout applies to a whole call
            connection.sendall(data[begin : begin + PIECE_BYTES])


def type_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype in torch."""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in host memory, in order."""
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def host_copies(tensors: Tensors) -> dict[str, Tensor]:
    """Private copies, each contiguous in this machine's memory."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
