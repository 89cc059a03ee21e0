"""Limits the connections of a server that a plugin runs on loopback, so that no program can exhaust the run.

    connections = Connections(descriptor_budget(), runner.server)
    server = await loop.create_server(connections.accept, "127.0.0.1", 0)

A request whose token is right is served inside `connections.in_use(transport)`.
"""

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

MAX_CONNECTIONS = 1024
DESCRIPTOR_SHARE = 4
"""A server's share of the descriptors that the process may open."""
HEAD_S = 10.0
"""Seconds within which a connection must present a valid token."""


def descriptor_budget() -> int:
    """The number of connections that may be open at once: a share of the process's limit of open files."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = MAX_CONNECTIONS if allowed == resource.RLIM_INFINITY else allowed // DESCRIPTOR_SHARE
    return max(1, min(MAX_CONNECTIONS, share))


class Connection(asyncio.Protocol):
    """Forwards one connection to the server's protocol, and closes it if no token arrives in time."""

    def __init__(self, serving: asyncio.Protocol, held: "Connections") -> None:
        self._serving, self._held = serving, held
        self._deadline: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self.known = False
        """True once it has presented a valid token."""
        self.num_requests = 0
        """Unfinished requests."""
        self.owner = ""
        """The owner of the last request, such as a sample."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open: the deadline for its token starts."""
        self.transport = cast(asyncio.Transport, transport)
        self._serving.connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self._check)
        self._held.add(self)

    def data_received(self, data: bytes) -> None:
        """Forward it."""
        self._serving.data_received(data)

    def eof_received(self) -> bool | None:
        """Forward it."""
        return self._serving.eof_received()

    def pause_writing(self) -> None:
        """Forward it."""
        self._serving.pause_writing()

    def resume_writing(self) -> None:
        """Forward it."""
        self._serving.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._held.discard(self)
        self._serving.connection_lost(exc)

    def _check(self) -> None:
        if not self.known:
            self.abort()

    def abort(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """The open connections. When there are too many, the most dispensable one is closed."""

    def __init__(self, most: int, serve: Callable[[], asyncio.Protocol]) -> None:
        self._most, self._serve = most, serve
        self._open: dict[asyncio.BaseTransport | None, Connection] = {}
        """By their transports, the oldest first."""

    def accept(self) -> asyncio.Protocol:
        """The protocol for a new connection."""
        return Connection(self._serve(), self)

    def add(self, connection: Connection) -> None:
        """Add an open one. Above the limit, closes the oldest without a token, else the oldest without a request."""
        self._open[connection.transport] = connection
        if len(self._open) > self._most:
            idle = [found for found in self._open.values() if not found.num_requests and found is not connection]
            unknown = (found for found in idle if not found.known)
            closed = next(unknown, next(iter(idle), connection))
            self.discard(closed)
            closed.abort()

    def discard(self, connection: Connection) -> None:
        """Remove a closed one."""
        self._open.pop(connection.transport, None)

    def abort_of(self, owner: str) -> None:
        """Close those with an unfinished request of an owner that ended: their client does not read the answer."""
        for connection in list(self._open.values()):
            if connection.owner == owner and connection.num_requests:
                connection.abort()

    def of(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        """The connection of a request."""
        return self._open.get(transport)

    @contextmanager
    def in_use(self, transport: asyncio.BaseTransport | None, owner: str = "") -> Iterator[None]:
        """Mark a request's connection as having a token; it is not closed to make room during the request.

        `owner`: whose request it is, for `abort_of`.
        """
        connection = self.of(transport)
        if connection is None:
            yield
            return
        connection.known, connection.owner = True, owner
        connection.num_requests += 1
        try:
            yield
        finally:
            connection.num_requests -= 1
