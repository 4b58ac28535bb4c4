"""HTTP for asyncio, on its streams: one connection for each request.

Just enough of HTTP/1.1 for Triton's generate endpoints: no redirects, no reuse of connections.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TypeVar

from pocket_client.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    ServerError,
    UnavailableError,
)
from pocket_client.options import GenerationRequest
from pocket_client.results import Arrivals, Chunk
from pocket_client.transport import DEADLINE_GRACE, Address, OutputValue, TensorValue
from pocket_client.wire_http import (
    MAX_LINE,
    call_body,
    generation_body,
    generation_path,
    output_of,
    parse_object,
    read_chunks,
    read_event,
    status_error,
)

CONNECT_SECONDS = 10.0
_MAX_HEADERS = 100
_T = TypeVar("_T")


class AsyncHttpTransport:
    """Implements ``AsyncTransport``."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._closed = False

    def open(self, request: GenerationRequest, timeout: float | None) -> AsyncHttpChunkStream:
        exchange = self._exchange(timeout)
        body = generation_body(request, timeout)
        return AsyncHttpChunkStream(request, exchange, generation_path(request), body)

    async def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue:
        exchange = self._exchange(timeout)
        try:
            await exchange.send(f"/v2/models/{model}/generate", call_body(inputs), ())
            return output_of(parse_object(await exchange.read()), output)
        finally:
            exchange.close()

    async def aclose(self) -> None:
        self._closed = True

    def _exchange(self, timeout: float | None) -> _Exchange:
        if self._closed:
            raise UnavailableError("the client is closed")
        return _Exchange(self._address, timeout)


class _Exchange:
    """One request and its response."""

    def __init__(self, address: Address, timeout: float | None) -> None:
        self._address = address
        now = asyncio.get_running_loop().time()
        self._deadline = None if timeout is None else now + timeout + DEADLINE_GRACE
        self._writer: asyncio.StreamWriter | None = None
        self._lines: AsyncIterator[bytes] | None = None
        self._closed = False

    async def send(self, path: str, body: bytes, headers: tuple[tuple[str, str], ...]) -> None:
        address = self._address
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    address.host,
                    address.port,
                    limit=MAX_LINE,
                    ssl=ssl.create_default_context() if address.tls else None,
                )
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"the server cannot be reached: {error!r}") from None
        self._writer = writer
        if self._closed:
            writer.close()
            raise RequestCancelledError("the request was cancelled")
        lines = [f"POST {path} HTTP/1.1", f"Host: {address.target}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)
        status, received = await self._limited(_read_head(reader))
        self._lines = _body_lines(reader, received)
        if status >= 400:
            raise status_error(status, await self.read())

    async def read(self) -> bytes:
        data = b""
        while line := await self.read_line():
            data += line
            if len(data) > MAX_LINE:
                raise ServerError("the server sent a response without end")
        return data

    async def read_line(self) -> bytes:
        """Empty at the end."""
        assert self._lines is not None
        return await self._limited(anext(self._lines, b""))

    def close(self) -> None:
        self._closed = True
        if self._writer is not None:
            self._writer.close()

    async def _limited(self, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError:
            raise DeadlineExceededError("not finished within the timeout") from None
        except (OSError, EOFError, ValueError) as error:
            if self._closed:
                raise RequestCancelledError("the request was cancelled") from None
            raise UnavailableError(f"the connection broke: {error!r}") from None


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await reader.readline()
    parts = status_line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise ValueError(f"not an HTTP answer: {status_line[:80]!r}")
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        line = await reader.readline()
        if line in (b"\r\n", b"\n"):
            return int(parts[1]), headers
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError("too many headers")


async def _body_lines(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """The body cut after each newline, chunked transfer coding removed."""
    pending = b""
    async for piece in _body_pieces(reader, headers):
        pending += piece
        while (end := pending.find(b"\n") + 1) > 0:
            yield pending[:end]
            pending = pending[end:]
        if len(pending) > MAX_LINE:
            raise ValueError("a line without end")
    if pending:
        yield pending


async def _body_pieces(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            if size > MAX_LINE:
                raise ValueError("a chunk without end")
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        size = int(headers["content-length"])
        if size > MAX_LINE:
            raise ValueError("a body without end")
        yield await reader.readexactly(size)
    else:
        while piece := await reader.read(1 << 16):
            yield piece


class AsyncHttpChunkStream:
    def __init__(
        self, request: GenerationRequest, exchange: _Exchange, path: str, body: bytes
    ) -> None:
        self._request = request
        self._exchange = exchange
        self._unsent: tuple[str, bytes] | None = (path, body)
        self._arrivals = Arrivals(request.outputs)

    async def __anext__(self) -> Chunk:
        try:
            return await self._next()
        except BaseException:
            self._exchange.close()
            raise

    async def _next(self) -> Chunk:
        while (chunk := self._arrivals.take()) is None:
            if self._arrivals.finished:
                raise StopAsyncIteration
            self._arrivals.add(read_chunks(await self._response(), self._request))
        return chunk

    async def _response(self) -> dict[str, object]:
        if self._unsent is not None:
            (path, body), self._unsent = self._unsent, None
            await self._exchange.send(path, body, self._request.headers)
            if not self._request.stream:
                return parse_object(await self._exchange.read())
        while line := await self._exchange.read_line():
            event = read_event(line)
            if event is not None:
                return event
        raise UnavailableError("the server ended the stream without a final response")

    def leave(self) -> bool:
        self._exchange.close()
        return False

    async def drain(self, seconds: float) -> None:
        pass

    def cancel(self) -> None:
        self._exchange.close()
