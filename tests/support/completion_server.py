"""A server of `/v1/completions` for tests of its clients: the prompt's first word is what it does.

`ok` streams all tokens, `stop` ends one early, `refuse` answers 503, `cut` closes without `[DONE]`,
`error` sends an error event, `pairs` sends two tokens at a time; chunks are cut in odd places.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_CUT = 7


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CompletionServer

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        behaviour = body["prompt"].split()[0]
        if behaviour == "refuse":
            self.send_error(503, "no room")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        step = 2 if behaviour == "pairs" else 1
        wanted = body["max_tokens"] - (behaviour == "stop")
        for _ in range(0, wanted, step):
            time.sleep(self.server.delay)
            self._event({"choices": [{"text": "x" * step, "finish_reason": None}]})
        if behaviour == "error":
            self._event({"error": {"message": "engine dead"}})
        elif behaviour != "cut":
            reason = "stop" if behaviour == "stop" else "length"
            self._event({"choices": [{"text": "", "finish_reason": reason}]})
            self._event({"choices": [], "usage": {"completion_tokens": wanted}})
            self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self._chunk(data[:_CUT])
        self._chunk(data[_CUT:])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *_: object) -> None:
        pass


class CompletionServer(ThreadingHTTPServer):
    """Context manager; ``delay``: seconds before each piece. ``bodies``: what was asked."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.delay = delay
        self.bodies: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"
