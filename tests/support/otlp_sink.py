"""A collector for tests: takes OTLP over HTTP, protobuf (the SDK's) or JSON (Triton's)."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

pytest.importorskip("opentelemetry.proto", reason="needs the extra `tracing`")

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)


@dataclass(frozen=True, slots=True)
class Received:
    """A span as it came; ids in lower-case hexadecimal, ``parent`` empty for a root."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    begin: int
    end: int
    """Nanoseconds since the epoch."""
    attributes: dict[str, Any]


class OtlpSink(ThreadingHTTPServer):
    """Context manager. ``url`` is the base address, as in ``OTEL_EXPORTER_OTLP_ENDPOINT``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self.encodings: set[str] = set()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, spans: list[Received], encoding: str) -> None:
        with self._lock:
            self._spans += spans
            self.encodings.add(encoding)

    def of(self, trace: str) -> list[Received]:
        """The spans of one trace that have come so far, by their begin."""
        with self._lock:
            return sorted((s for s in self._spans if s.trace == trace), key=lambda s: s.begin)


class _Handler(BaseHTTPRequestHandler):
    server: OtlpSink

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        encoding = self.headers["Content-Type"].partition(";")[0]
        if encoding == "application/json":
            document = json.loads(body)
        else:
            message = ExportTraceServiceRequest.FromString(body)
            document = MessageToDict(message)
        self.server.add(_spans(document, hexadecimal=encoding == "application/json"), encoding)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _spans(document: dict[str, Any], *, hexadecimal: bool) -> list[Received]:
    found = []
    for group in document["resourceSpans"]:
        resource = _values(group.get("resource", {}).get("attributes", ()))
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                ids = [span.get(key, "") for key in ("traceId", "spanId", "parentSpanId")]
                if not hexadecimal:
                    ids = [_hexadecimal(text) for text in ids]
                begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                attributes = _values(span.get("attributes", ()))
                service = resource.get("service.name", "")
                trace, own, parent = (text.lower() for text in ids)
                found.append(
                    Received(service, span["name"], trace, own, parent, begin, end, attributes)
                )
    return found


def _hexadecimal(text: str) -> str:
    """protobuf's JSON has bytes in base64; OTLP's JSON has ids in hexadecimal."""
    return base64.b64decode(text).hex()


def _values(pairs: Any) -> dict[str, Any]:
    return {pair["key"]: next(iter(pair["value"].values()), None) for pair in pairs}
