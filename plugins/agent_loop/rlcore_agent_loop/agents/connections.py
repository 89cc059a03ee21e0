"""Limits connections and request bodies of the endpoint, so that agents cannot exhaust the run."""

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web

from rlcore.errors import RlcoreError
from rlcore_agent_loop.agents.messages import BadRequest

MAX_CONNECTIONS = 1024
DESCRIPTOR_SHARE = 4
"""The endpoint's share of the descriptors that the process may open."""
HEAD_S = 10.0
"""Seconds within which a connection must present the token of a running sample."""
BODY_S = 30.0
"""Seconds within which a request's body must arrive."""
MAX_AT_ONCE = 64
"""Requests of one sample in flight."""
MAX_BODY_BYTES = 8 << 20
MAX_SAMPLE_BYTES = 2 * MAX_BODY_BYTES
"""Bytes of one sample's bodies that may be read at a time."""
MAX_BYTES = 16 * MAX_BODY_BYTES
"""Bytes of all bodies that may be read at a time."""


class TooBusy(RlcoreError):
    """A request that may be retried later."""


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
        """True once it has presented the token of a running sample."""
        self.num_requests = 0
        """Requests under way."""
        self.sample = ""
        """The sample of the last request."""

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

    def abort_of(self, sample: str) -> None:
        """Close those with a request of a sample that ended a while ago: their client does not read the answer."""
        for connection in list(self._open.values()):
            if connection.sample == sample and connection.num_requests:
                connection.abort()

    def of(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        """The connection of a request."""
        return self._open.get(transport)


class Bodies:
    """Limits requests in flight and the bytes of their bodies, per sample and in total."""

    def __init__(self) -> None:
        self._num_bytes: Counter[str] = Counter()
        self._num_requests: Counter[str] = Counter()

    @contextmanager
    def request(self, sample: str) -> Iterator[None]:
        """Count a request of the sample while it is in flight; TooBusy when there are too many."""
        if self._num_requests[sample] >= MAX_AT_ONCE:
            raise TooBusy(f"this sample has {MAX_AT_ONCE} requests under way; wait for one of them")
        self._num_requests[sample] += 1
        try:
            yield
        finally:
            self._num_requests[sample] -= 1
            if not self._num_requests[sample]:
                del self._num_requests[sample]

    async def read(self, sample: str, content: AsyncIterator[bytes]) -> bytes:
        """The body of a request. BadRequest if it is too large or late, TooBusy if too much is being read."""
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in content:
                    found += chunk
                    self._num_bytes[sample] += len(chunk)
                    if len(found) > MAX_BODY_BYTES:
                        raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
                    if self._num_bytes[sample] > MAX_SAMPLE_BYTES or self._num_bytes.total() > MAX_BYTES:
                        raise TooBusy("too much is being sent at once; try again")
        except TimeoutError as cause:
            raise BadRequest(f"the body has not come within {BODY_S:g} s") from cause
        except web.RequestPayloadError as cause:
            raise BadRequest("the body is not of the Content-Encoding that the request names") from cause
        finally:
            self._num_bytes[sample] -= len(found)
            if not self._num_bytes[sample]:
                del self._num_bytes[sample]
        return bytes(found)
