"""The clients' HTTP side against canned answers, whole, in pieces and broken."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

import pytest
from reading import WAIT, closed_once_reading

from pocket_client import (
    AsyncClient,
    Client,
    Completion,
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PocketClientError,
    RequestCancelledError,
    RetryPolicy,
    ServerError,
    UnavailableError,
)

ONCE = RetryPolicy(attempts=1)


class CannedServer:
    """Answers each connection with the next of ``answers`` (the last one repeats), then closes it.

    An answer is a list of pieces, sent one by one; None holds the connection open until the end.
    """

    def __init__(self, *answers: list[bytes | None]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, dict[str, object]]] = []
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(WAIT)

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                piece = connection.recv(65536)
                if not piece:  # the client left before it had sent all
                    return
                data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            lower = head.lower()
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            while len(body) < length:
                piece = connection.recv(65536)
                if not piece:
                    return
                body += piece
            path = head.split()[1].decode()
            self.requests.append((path, json.loads(body)))
            answers = self._answers
            for piece in answers.pop(0) if len(answers) > 1 else answers[0]:
                if piece is None:
                    self._over.wait(WAIT)
                    return
                try:
                    connection.sendall(piece)
                except OSError:
                    return


def result(text: str, reason: str = "", ids: object = 1) -> dict[str, object]:
    return {
        "text_output": text,
        "token_ids": ids,
        "finish_reason": reason,
        "stop_reason": "",
        "num_input_tokens": 3,
        "num_output_tokens": 2,
        "num_cached_tokens": 1,
        "model_name": "pocketllm",
    }


def plain(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} What\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def events(*bodies: object, end: bool = True) -> bytes:
    """An event stream in chunked coding, as Triton sends it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    for body in bodies:
        data = b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
        head += f"{len(data):x}\r\n".encode() + data + b"\r\n"
    return head + (b"0\r\n\r\n" if end else b"")


def bytewise(data: bytes) -> list[bytes | None]:
    return [data[i : i + 1] for i in range(len(data))]


Ask = Callable[..., tuple[list[str], Completion]]


def ask_sync(
    url: str, *, stream: bool, timeout: float | None = WAIT
) -> tuple[list[str], Completion]:
    with Client(url, retry=ONCE, timeout=timeout) as client:
        if not stream:
            completion = client.generate("x", request_id="mine")
            return [completion.text], completion
        opened = client.stream("x", request_id="mine")
        return [chunk.text for chunk in opened], opened.completion


def ask_async(
    url: str, *, stream: bool, timeout: float | None = 10
) -> tuple[list[str], Completion]:
    async def main() -> tuple[list[str], Completion]:
        async with AsyncClient(url, retry=ONCE, timeout=timeout) as client:
            if not stream:
                completion = await client.generate("x", request_id="mine")
                return [completion.text], completion
            opened = client.stream("x", request_id="mine")
            return [chunk.text async for chunk in opened], opened.completion

    return asyncio.run(main())


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen


STREAM = events(result("Hé"), result("", ids=[]), result("llo", "stop", [2, 3]))


@pytest.mark.parametrize("pieces", [[STREAM], bytewise(STREAM)], ids=["whole", "bytewise"])
def test_streams(ask: Ask, pieces: list[bytes | None]) -> None:
    with CannedServer(pieces) as server:
        texts, completion = ask(server.url, stream=True)
    assert texts == ["Hé", "", "llo"]
    assert (completion.text, completion.token_ids) == ("Héllo", (1, 2, 3))
    assert (completion.usage.prompt_tokens, completion.usage.cached_tokens) == (3, 1)
    ((path, body),) = server.requests
    assert path == "/v2/models/pocketllm/generate_stream"
    parameters = json.loads(str(body.pop("sampling_parameters")))
    assert parameters.pop("timeout_ms") > 9000
    assert parameters == {"stream": True}
    assert body == {"text_input": "x", "id": "mine"}


def test_single_answers(ask: Ask) -> None:
    answer = plain(200, json.dumps(result("all", "length", [1, 2])).encode())
    with CannedServer([answer]) as server:
        _, completion = ask(server.url, stream=False)
    assert (completion.text, completion.finish_reason) == ("all", "length")
    assert server.requests[0][0] == "/v2/models/pocketllm/generate"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (plain(400, b'{"error": "in ensemble \'pocketllm\', top_p: got 2; no"}'),
         InvalidRequestError),
        (plain(400, b'data: {"error": "top_p: got 2; no"}\n\n', "text/event-stream"),
         InvalidRequestError),
        (plain(400, b'{"error": "not finished within 1 s of arrival"}'), DeadlineExceededError),
        (plain(404, b'{"error": "Request for unknown model: x"}'), ModelNotFoundError),
        (plain(503, b'{"error": "retry later"}'), OverloadedError),
        (plain(503, b"<html>proxy</html>"), OverloadedError),
        (plain(413, b""), InvalidRequestError),
        (plain(500, b"oops"), ServerError),
        (plain(200, b"not json"), PocketClientError),
        (events({"error": "computing failed"}), ServerError),
        (b"SSH-2.0-nonsense\r\n\r\n", UnavailableError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nshort", UnavailableError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", UnavailableError),
        (b"", UnavailableError),
    ],
)  # fmt: skip
def test_broken_answers_are_typed_errors(
    ask: Ask, answer: bytes, kind: type[PocketClientError], stream: bool
) -> None:
    with CannedServer([answer]) as server, pytest.raises(kind) as caught:
        ask(server.url, stream=stream)
    assert "in ensemble" not in str(caught.value)


@pytest.mark.parametrize("damage", ["finish_reason", "token_ids", "num_input_tokens"])
def test_malformed_results(ask: Ask, damage: str) -> None:
    body = result("a", "stop")
    for value in ("nonsense", None):
        broken = {**body, damage: value}
        with (
            CannedServer([events(broken)]) as server,
            pytest.raises(ServerError, match=r"malformed|unknown finish"),
        ):
            ask(server.url, stream=True)


@pytest.mark.parametrize("end", [False, True], ids=["cut", "ended"])
def test_a_stream_without_an_end(ask: Ask, end: bool) -> None:
    with CannedServer([events(result("a"), end=end)]) as server, pytest.raises(UnavailableError):
        ask(server.url, stream=True)


def test_nobody_listens(ask: Ask) -> None:
    with pytest.raises(UnavailableError):
        ask("http://127.0.0.1:9", stream=True)


@pytest.mark.parametrize("pieces", [[None], [events(result("a"), end=False), None]])
def test_timeouts(ask: Ask, pieces: list[bytes | None]) -> None:
    with CannedServer(pieces) as server:
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            ask(server.url, stream=True, timeout=0.2)
        assert time.monotonic() - started < WAIT / 2  # the server would hold on for longer


def test_unavailable_is_retried() -> None:
    good = [plain(200, json.dumps(result("all", "stop")).encode())]
    retry = RetryPolicy(attempts=3, initial_seconds=0.01)
    busy = [plain(503, b"busy")]
    with CannedServer([b""], busy, good) as server, Client(server.url, retry=retry) as client:
        assert client.generate("x").text == "all"
        assert len(server.requests) == 3


def test_closing_from_another_thread_wakes_the_reader() -> None:
    pieces = [events(result("a"), end=False), None]
    with CannedServer(pieces) as server, Client(server.url) as client:
        stream = client.stream("x")
        assert next(stream).text == "a"
        with closed_once_reading(stream), pytest.raises(RequestCancelledError):
            next(stream)


def test_leaving_an_async_stream_closes_the_connection() -> None:
    async def main(url: str) -> None:
        async with AsyncClient(url) as client:
            stream = client.stream("x")
            assert (await anext(stream)).text == "a"
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)  # the reader's turn: it waits
            await stream.aclose()
            with pytest.raises(RequestCancelledError):
                await reader

    with CannedServer([events(result("a"), end=False), None]) as server:
        asyncio.run(main(server.url))


def test_a_closed_client_sends_nothing() -> None:
    client = Client("http://127.0.0.1:9")
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.stream("x")


@pytest.fixture(autouse=True)
def quick_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canned servers do not answer control messages, so do not insist on them."""
    monkeypatch.setattr("pocket_client.cancelling.CALL_SECONDS", 0.2)
    monkeypatch.setattr("pocket_client.client.CALL_SECONDS", 0.2)
    monkeypatch.setattr("pocket_client.aio.CALL_SECONDS", 0.2)
    monkeypatch.setattr("pocket_client.cancelling._WAITS", ())
