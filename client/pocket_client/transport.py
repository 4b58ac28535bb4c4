"""What a client needs of a transport, and how an address names one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from pocket_client.options import GenerationRequest
from pocket_client.results import Chunk

OutputValue = str | tuple[int, ...]
TensorValue = OutputValue | bool
"""Text is a BYTES tensor of one element, a flag a BOOL tensor of one, ids are an INT32 vector."""

DEADLINE_GRACE = 0.25
"""Seconds that the transport waits beyond a request's timeout: the server, which gets the same
timeout, says better what happened."""


class ChunkStream(Protocol):
    """One request's answer. Single consumer; the other methods may be called from any thread.

    Whoever stops before the end calls ``leave``, and then ``drain`` if that says so. A gRPC stream
    is not simply cancelled: Triton 2.51 keeps a request for ever, and with it its model, when the
    cancellation meets a stream that has just been answered.
    """

    def __next__(self) -> Chunk:
        """Raises StopIteration after the last chunk, PocketClientError otherwise."""

    def leave(self) -> bool:
        """Stop reading, without waiting; whether ``drain`` has to follow. Idempotent."""

    def drain(self, seconds: float) -> None:
        """Read to the end, which the owner has caused; after ``seconds``, cancel the stream."""

    def cancel(self) -> None:
        """The last resort of an owner that cannot wait."""


class AsyncChunkStream(Protocol):
    """As ``ChunkStream``."""

    async def __anext__(self) -> Chunk:
        """Raises StopAsyncIteration after the last chunk, PocketClientError otherwise."""

    def leave(self) -> bool: ...

    async def drain(self, seconds: float) -> None: ...

    def cancel(self) -> None: ...


class Transport(Protocol):
    """Thread-safe."""

    def open(self, request: GenerationRequest, timeout: float | None) -> ChunkStream: ...

    def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue:
        """One request with one response, of which one output is wanted."""

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Belongs to the event loop that it is first used on."""

    def open(self, request: GenerationRequest, timeout: float | None) -> AsyncChunkStream: ...

    async def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed server address."""

    scheme: Literal["grpc", "http"]
    host: str
    port: int
    tls: bool

    @property
    def target(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


_SCHEMES: Mapping[str, tuple[Literal["grpc", "http"], bool, int]] = {
    "grpc": ("grpc", False, 8001),
    "grpcs": ("grpc", True, 8001),
    "http": ("http", False, 8000),
    "https": ("http", True, 443),
}


def parse_address(text: str) -> Address:
    """``host:port`` (gRPC), or with one of the schemes grpc, grpcs, http, https.

    Raises:
        ValueError: anything else.
    """
    problem = f"address: got {text[:100]!r}; must be like 127.0.0.1:8001 or http://127.0.0.1:8000"
    try:
        parts = urlsplit(text if "://" in text else f"grpc://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(problem) from None
    if parts.scheme not in _SCHEMES or not host or parts.path not in ("", "/") or parts.query:
        raise ValueError(problem)
    scheme, tls, default_port = _SCHEMES[parts.scheme]
    return Address(scheme, host, default_port if port is None else port, tls)
