"""Limits of the endpoint's connections and request bodies: no agent takes what the run needs."""

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
"""The endpoint takes at most this part of the descriptors that the process may open."""
HEAD_S = 10.0
"""Seconds until a connection must have shown the token of a running sample."""
BODY_S = 30.0
"""Seconds until the body of a request must have come."""
MAX_AT_ONCE = 64
"""Requests of one sample under way."""
MAX_BODY_BYTES = 8 << 20
MAX_SAMPLE_BYTES = 2 * MAX_BODY_BYTES
"""Bytes of bodies of one sample that are being read."""
MAX_BYTES = 16 * MAX_BODY_BYTES
"""Bytes of all bodies that are being read."""


class TooBusy(RlcoreError):
    """A request that would be answered later."""


def descriptor_budget() -> int:
    """The number of connections that may be open at once: a share of the process's limit of open files."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    share = MAX_CONNECTIONS if allowed == resource.RLIM_INFINITY else allowed // DESCRIPTOR_SHARE
    return max(1, min(MAX_CONNECTIONS, share))


class Connection(asyncio.Protocol):
    """Passes one connection on to the server's protocol, and closes it when no token has come in time."""

    def __init__(self, serving: asyncio.Protocol, held: "Connections") -> None:
        self._serving, self._held = serving, held
        self._deadline: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self.known = False
        """True when it has shown the token of a running sample."""
        self.num_requests = 0
        """Requests under way."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open: the deadline for its token begins."""
        self.transport = cast(asyncio.Transport, transport)
        self._serving.connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self._check)
        self._held.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._serving.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._serving.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._serving.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._serving.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._held.discard(self)
        self._serving.connection_lost(exc)

    def _check(self) -> None:
        if not self.known:
            self.abort()

    def abort(self) -> None:
        """Close it without another word."""
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """The open connections. When there are too many, the one is closed that is missed least."""

    def __init__(self, most: int, serve: Callable[[], asyncio.Protocol]) -> None:
        self._most, self._serve = most, serve
        self._open: dict[asyncio.BaseTransport | None, Connection] = {}
        """By their transports, the oldest first."""

    def accept(self) -> asyncio.Protocol:
        """The protocol of a connection that was made."""
        return Connection(self._serve(), self)

    def add(self, connection: Connection) -> None:
        """It is open. Above the limit the oldest one without a token is closed, else the oldest without a request."""
        self._open[connection.transport] = connection
        if len(self._open) > self._most:
            idle = [found for found in self._open.values() if not found.num_requests and found is not connection]
            unknown = (found for found in idle if not found.known)
            closed = next(unknown, next(iter(idle), connection))
            self.discard(closed)
            closed.abort()

    def discard(self, connection: Connection) -> None:
        """It is closed."""
        self._open.pop(connection.transport, None)

    def of(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        """The connection of a request."""
        return self._open.get(transport)


class Bodies:
    """Limits the requests under way and the bytes of their bodies, of one sample and of all."""

    def __init__(self) -> None:
        self._num_bytes: Counter[str] = Counter()
        self._num_requests: Counter[str] = Counter()

    @contextmanager
    def request(self, sample: str) -> Iterator[None]:
        """Count a request of the sample for as long as it is under way; TooBusy when there are too many."""
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
        """The body of a request. BadRequest when it is too large or late, TooBusy when too much is being read."""
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
