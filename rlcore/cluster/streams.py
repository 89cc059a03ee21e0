"""Merges streams, and reads pipes as streams."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import IO, Any

from rlcore.errors.redaction import redact

MAX_REST = 1 << 16
"""Bytes that are kept of a line without an end."""


async def merged(streams: Sequence[AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """The items of all streams as they arrive; the first error ends them all, and so does closing this one."""
    if len(streams) == 1:
        try:
            async for value in streams[0]:
                yield value
        finally:
            await streams[0].aclose()
        return
    arrived: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def drain(stream: AsyncGenerator[Any, None]) -> None:
        try:
            async for value in stream:
                arrived.put_nowait([value])
        finally:
            arrived.put_nowait([])
            await stream.aclose()

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            items = await arrived.get()
            for value in items:
                yield value
            if not items:
                left -= 1
                for task in tasks:
                    if task.done():
                        task.result()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def pipe_reader(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """A reader of the pipe, and the transport that closes it."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


async def lines(reader: asyncio.StreamReader) -> AsyncGenerator[str, None]:
    """The lines as they come; of one that does not end, its last MAX_REST bytes."""
    rest = b""
    while chunk := await reader.read(1 << 16):
        *whole, rest = (rest + chunk).split(b"\n")
        rest = _end_of(rest) if len(rest) > MAX_REST else rest
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _end_of(line: bytes) -> bytes:
    """The last MAX_REST bytes without secrets: a cut within a secret would leave a half that is not recognised."""
    text = redact(line.decode("utf-8", "surrogateescape"))
    return text.encode("utf-8", "surrogateescape")[-MAX_REST:]
