"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any


async def merged(streams: Sequence[AsyncGenerator[Any, None]]) -> AsyncGenerator[Any, None]:
    """The items of all streams as they come; the first error ends them all, and so does closing this one."""
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
