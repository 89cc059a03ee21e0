"""Limits requests of the endpoint and their bodies, so that agents cannot exhaust the run."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from aiohttp import web

from rlcore.errors import RlcoreError
from rlcore_agent_loop.agents.messages import BadRequest

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


class Bodies:
    """Limits requests in flight and the bytes of their bodies, per sample and in total."""

    def __init__(self) -> None:
        self._num_bytes: Counter[str] = Counter()
        self._num_requests: Counter[str] = Counter()

    @contextmanager
    def request(self, sample: str) -> Iterator[None]:
        """Count a request of the sample while it is in flight; TooBusy when there are too many."""
        if self._num_requests[sample] >= MAX_AT_ONCE:
            raise TooBusy(f"this sample has {MAX_AT_ONCE} unfinished requests; wait for one of them")
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
