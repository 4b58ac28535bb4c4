"""The console's files, with the headers that keep what a model writes from becoming a program."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from pocket_client.gateway.console.figures import Figures
from pocket_client.gateway.errors import ApiError
from pocket_client.gateway.service import Service

STATIC = Path(__file__).parent / "static"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes HTML in one place only: DOMPurify's own policy.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # A new version is seen at once; an unchanged file costs one 304.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    etag: str


def _read_files() -> dict[str, _File]:
    """URL path -> file; ``index.html`` is at ``/``."""
    files = {}
    for path in sorted(STATIC.rglob("*")):
        if path.suffix not in _KINDS or not path.is_file():
            continue
        name = path.relative_to(STATIC).as_posix()
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        url = "/" if name == "index.html" else f"/console/{name}"
        files[url] = _File(body, _KINDS[path.suffix], etag)
    return files


_FILES = _read_files()
CONSOLE_PATHS = frozenset(_FILES)
"""Answered without an API key."""


def add_console(app: FastAPI, service: Service) -> None:
    """Add the console's endpoints to ``app``."""
    figures = Figures(service)

    @app.get("/console/metrics")
    async def console_metrics() -> JSONResponse:
        """What the console shows of engine and gateway, at most half a second old."""
        return JSONResponse(await figures.snapshot(), headers={"cache-control": "no-store"})

    async def page(request: Request) -> Response:
        file = _FILES.get(request.url.path)
        if file is None:
            raise ApiError(404, "the console has no such file")
        headers = {**_HEADERS, "etag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.kind)

    for path in ("/", "/console/{name:path}"):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
