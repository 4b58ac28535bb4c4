"""HTTP for ordinary threads, by the standard library: one connection for each request."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Iterator, Mapping

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


class HttpTransport:
    """Implements ``Transport``."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._closed = False

    def open(self, request: GenerationRequest, timeout: float | None) -> HttpChunkStream:
        exchange = self._exchange(timeout)
        body = generation_body(request, timeout)
        return HttpChunkStream(request, exchange, generation_path(request), body)

    def call(
        self, model: str, inputs: Mapping[str, TensorValue], output: str, timeout: float | None
    ) -> OutputValue:
        exchange = self._exchange(timeout)
        try:
            exchange.send(f"/v2/models/{model}/generate", call_body(inputs), ())
            return output_of(parse_object(exchange.read()), output)
        finally:
            exchange.close()

    def close(self) -> None:
        self._closed = True

    def _exchange(self, timeout: float | None) -> _Exchange:
        if self._closed:
            raise UnavailableError("the client is closed")
        return _Exchange(self._address, timeout)


class _Exchange:
    """One request and its response. ``close`` may come from another thread."""

    def __init__(self, address: Address, timeout: float | None) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout + DEADLINE_GRACE
        if address.tls:
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                address.host,
                address.port,
                timeout=CONNECT_SECONDS,
                context=ssl.create_default_context(),
            )
        else:
            self._connection = http.client.HTTPConnection(
                address.host, address.port, timeout=CONNECT_SECONDS
            )
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None
        self._closed = False

    def send(self, path: str, body: bytes, headers: tuple[tuple[str, str], ...]) -> None:
        """Send and wait for the response's headers; Triton sends them with its first result."""
        with self._typed_errors():
            self._connection.connect()
            self._socket = self._connection.sock
            if self._closed:
                raise ConnectionAbortedError
            self._limit()
            sent = {"Content-Type": "application/json", **dict(headers)}
            self._connection.request("POST", path, body, sent)
            self._response = self._connection.getresponse()
            if self._response.status >= 400:
                raise status_error(self._response.status, self._response.read(MAX_LINE))

    def read(self) -> bytes:
        assert self._response is not None
        with self._typed_errors():
            self._limit()
            data = self._response.read(MAX_LINE + 1)
        if len(data) > MAX_LINE:
            raise ServerError("the server sent a response without end")
        if self._response.length:  # of what was announced, so much never came
            raise UnavailableError("the server ended its response early")
        return data

    def read_line(self) -> bytes:
        """Empty at the end."""
        assert self._response is not None
        with self._typed_errors():
            self._limit()
            line = self._response.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise ServerError("the server sent an event without end")
        return line

    def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a reader in another thread
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _limit(self) -> None:
        if self._socket is None:
            return
        if self._deadline is None:
            self._socket.settimeout(None)
            return
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining)

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            if self._socket is None:
                raise UnavailableError("the server cannot be reached: no connection") from None
            raise DeadlineExceededError("not finished within the timeout") from None
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # The last two: http.client's own files, closed by another thread.
            if self._closed:
                raise RequestCancelledError("the request was cancelled") from None
            raise UnavailableError(f"the server cannot be reached: {error!r}") from None


class HttpChunkStream:
    def __init__(
        self, request: GenerationRequest, exchange: _Exchange, path: str, body: bytes
    ) -> None:
        self._request = request
        self._exchange = exchange
        self._unsent: tuple[str, bytes] | None = (path, body)
        self._arrivals = Arrivals(request.outputs)

    def __next__(self) -> Chunk:
        try:
            return self._next()
        except BaseException:
            self._exchange.close()
            raise

    def _next(self) -> Chunk:
        while (chunk := self._arrivals.take()) is None:
            if self._arrivals.finished:
                raise StopIteration
            self._arrivals.add(read_chunks(self._response(), self._request))
        return chunk

    def _response(self) -> dict[str, object]:
        if self._unsent is not None:
            (path, body), self._unsent = self._unsent, None
            self._exchange.send(path, body, self._request.headers)
            if not self._request.stream:
                return parse_object(self._exchange.read())
        while line := self._exchange.read_line():
            event = read_event(line)
            if event is not None:
                return event
        raise UnavailableError("the server ended the stream without a final response")

    def leave(self) -> bool:
        self._exchange.close()
        return False

    def drain(self, seconds: float) -> None:
        pass

    def cancel(self) -> None:
        self._exchange.close()
