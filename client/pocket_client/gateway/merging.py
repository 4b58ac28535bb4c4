"""The chunks of several streams as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from pocket_client.gateway.upstreams import ChunkSource
from pocket_client.results import Chunk

_QUEUED = 64
"""Chunks that may wait for a slow client; then gRPC's flow control holds the server back."""


async def merge(streams: Sequence[ChunkSource]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(index of the stream, chunk) in order of arrival.

    The first error ends all. However the iteration ends, every stream is closed, and so cancelled
    upstream unless it was finished.
    """
    if len(streams) == 1:
        async with streams[0] as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(_QUEUED)
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        open_streams = len(streams)
        while open_streams:
            index, item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        for stream in streams:
            await stream.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: ChunkSource, queue: asyncio.Queue[tuple[int, Chunk | Exception | None]]
) -> None:
    try:
        async for chunk in stream:
            await queue.put((index, chunk))
    except Exception as error:  # noqa: BLE001  (raised again by the reader)
        await queue.put((index, error))
    else:
        await queue.put((index, None))
