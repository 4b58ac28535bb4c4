"""Around every request: its id, who sent it, how much of it is read, and what is counted."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pocket_client.gateway.auth import ANONYMOUS, Tenant
from pocket_client.gateway.console import CONSOLE_PATHS
from pocket_client.gateway.errors import ApiError
from pocket_client.gateway.generation import CLIENT_GONE, send_error
from pocket_client.gateway.service import Service
from pocket_client.gateway.tracing import GatewaySpan
from pocket_client.options import new_request_id, valid_request_id

_log = logging.getLogger("pocket_client.gateway")
_Message = MutableMapping[str, Any]
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without an API key: orchestrators probe them."""


class ClientGoneError(Exception):
    """The client left before its request was complete."""


class GatewayMiddleware:
    """Pure ASGI: it neither buffers answers nor hides a disconnect."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(headers)
        state["status"] = None
        state["headers"] = {}
        span = self._span(scope, headers)
        if span is not None:
            state["trace_headers"] = span.headers
        started = time.monotonic()

        async def tagged(message: _Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                own = {"x-request-id": state["request_id"], **state["headers"]}
                tags = [(name.encode(), value.encode()) for name, value in own.items()]
                message["headers"] = [*message.get("headers", ()), *tags]
            await send(message)

        try:
            await self._handle(scope, headers, receive, tagged)
        except ClientGoneError:
            state["status"] = CLIENT_GONE
        except Exception:  # noqa: BLE001  (nothing but OpenAI's error objects leaves)
            _log.exception("request %s failed", state["request_id"])
            if state["status"] is None:
                await send_error(tagged, ApiError(500, "internal error"))
        finally:
            self._count(scope, time.monotonic() - started)
            if span is not None:
                span.end(_endpoint(scope), state["status"] or 500, state["request_id"])

    def _span(self, scope: Scope, headers: Headers) -> GatewaySpan | None:
        tracing = self._service.tracing
        if tracing is None or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            return None
        return tracing.start(headers)

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            scope["state"]["tenant"] = self._tenant(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            await send_error(send, error)
            return
        replayed = False

        async def replay() -> _Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _tenant(self, path: str, headers: Headers) -> Tenant:
        keys = self._service.settings.api_keys
        if path in OPEN_PATHS:
            return ANONYMOUS
        if not keys:
            self._check_host(headers.get("host", ""))
            return ANONYMOUS
        tenant = keys.tenant_of(headers.get("authorization", ""))
        if tenant is None and path in CONSOLE_PATHS:
            return ANONYMOUS
        if tenant is None:
            raise ApiError(
                401,
                "missing or wrong API key; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return tenant

    def _check_host(self, host: str) -> None:
        """Without keys, being reachable only from here is the protection, so nobody else's name may
        lead here (DNS rebinding)."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name in ("", "localhost") or name in self._service.settings.allowed_hosts:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise ApiError(
                403,
                "this Host is not allowed without API keys; start the gateway with --allowed-host",
                code="host_not_allowed",
            ) from None

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._service.settings.max_body_bytes
        too_large = ApiError(
            413, f"the body is too large; at most {limit} bytes are accepted", code="body_too_large"
        )
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 15 or int(length) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._service.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="body_timeout") from None

    def _count(self, scope: Scope, seconds: float) -> None:
        endpoint = _endpoint(scope)
        metrics = self._service.metrics
        metrics.requests.labels(endpoint, str(scope["state"]["status"] or 500)).inc()
        metrics.request_seconds.labels(endpoint).observe(seconds)


def _endpoint(scope: Scope) -> str:
    path: str = getattr(scope.get("route"), "path", "other")
    return path


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id")
    return given if given is not None and valid_request_id(given) else new_request_id()
