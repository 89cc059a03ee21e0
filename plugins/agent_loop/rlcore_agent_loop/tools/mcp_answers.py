"""Bounds answers of tool servers over HTTP, which the package mcp reads into memory however long they are."""

import math
from collections.abc import AsyncIterator

from httpx2 import AsyncByteStream, Response, StreamError

from rlcore_agent_loop.tools.mcp_relay import MAX_LINE

ENCODING = {"accept-encoding": "identity"}
"""Header of requests for answers that are not compressed, whose size is known only after they are unpacked."""


class BoundedBody(AsyncByteStream):
    """A body of at most `most` bytes that is not compressed."""

    def __init__(self, body: AsyncByteStream, encoding: str, most: float) -> None:
        self._body, self._encoding, self._most = body, encoding, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The body's parts; StreamError, which fails the call and leaves the session alive, if it cannot be read."""
        if self._encoding.lower() not in ("", "identity"):
            raise StreamError(
                f"the answer is compressed ({self._encoding}), although the request allows no compression"
            )
        size = 0
        async for part in self._body:
            size += len(part)
            if size > self._most:
                raise StreamError(f"the answer has more than {self._most} bytes")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


async def bound(response: Response) -> None:
    """An event hook that bounds an answer as a line of a server that is started here. Of a stream of events the package
    bounds each."""
    if isinstance(response.stream, AsyncByteStream):
        has_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        most = math.inf if has_events else MAX_LINE
        response.stream = BoundedBody(response.stream, response.headers.get("content-encoding", ""), most)
