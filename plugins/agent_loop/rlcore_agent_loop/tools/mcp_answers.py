"""Bounds answers of tool servers over HTTP, which the package mcp reads into memory however long they are."""

from collections.abc import AsyncIterator

from httpx2 import AsyncByteStream, Response, StreamError

from rlcore_agent_loop.tools.mcp_relay import MAX_LINE

ENCODING = {"accept-encoding": "identity"}
"""Header of requests for answers that are not compressed, whose size is known only after they are unpacked."""


class BoundedBody(AsyncByteStream):
    """A body of at most MAX_LINE bytes, as a line of a server that is started here."""

    def __init__(self, body: AsyncByteStream, encoding: str) -> None:
        self._body, self._encoding = body, encoding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The body's parts; StreamError, which fails the call and leaves the session alive, if it cannot be read."""
        if self._encoding.lower() not in ("", "identity"):
            raise StreamError(
                f"the answer is compressed ({self._encoding}), although the request allows no compression"
            )
        size = 0
        async for part in self._body:
            size += len(part)
            if size > MAX_LINE:
                raise StreamError(f"the answer has more than {MAX_LINE} bytes")
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


async def bound(response: Response) -> None:
    """An event hook. The package bounds streams of events itself."""
    if isinstance(response.stream, AsyncByteStream) and "text/event-stream" not in response.headers.get(
        "content-type", ""
    ):
        response.stream = BoundedBody(response.stream, response.headers.get("content-encoding", ""))
