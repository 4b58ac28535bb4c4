"""`pocketllm probe` against a scripted server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pocket_backend.cli import main

STATUS = {"ready": 200, "infer": 200}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(STATUS["ready"])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(STATUS["infer"])

    def _answer(self, status: int) -> None:
        body = b"{}" if status == 200 else b'{"error": "stub is not healthy"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("ready", "infer", "deep", "status"),
    [(200, 200, False, 0), (200, 200, True, 0), (200, 500, False, 0), (200, 500, True, 4),
     (400, 200, False, 4), (400, 200, True, 4)],
)  # fmt: skip
def test_statuses(
    url: str, ready: int, infer: int, deep: bool, status: int,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(STATUS, "ready", ready)
    monkeypatch.setitem(STATUS, "infer", infer)
    assert main.main(["probe", "--url", url, "--json", *(["--deep"] if deep else [])]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] is (status == 0)
    assert status == 0 or "stub is not healthy" in found["problem"]


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["probe", "--url", "http://127.0.0.1:1"]) == 4
    assert capsys.readouterr().out.startswith("not ready: ")
