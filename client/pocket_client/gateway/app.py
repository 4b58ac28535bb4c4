"""Puts the gateway together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pocket_client.gateway.console import add_console
from pocket_client.gateway.errors import ApiError, from_validation
from pocket_client.gateway.middleware import GatewayMiddleware
from pocket_client.gateway.openapi import openapi_document
from pocket_client.gateway.rate_limit import RATE_HEADERS
from pocket_client.gateway.routes import router
from pocket_client.gateway.service import Service
from pocket_client.gateway.settings import GatewaySettings

_HTTP_MESSAGES = {
    400: "the body cannot be read as JSON",
    404: "there is no such endpoint",
    405: "this endpoint does not have that method",
}


def create_app(settings: GatewaySettings | None = None) -> FastAPI:
    """An ASGI application; its upstream channel opens on the event loop that runs it."""
    service = Service(settings or GatewaySettings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.aclose()

    # The interactive documentation would load scripts from elsewhere.
    app = FastAPI(title="PocketLLM gateway", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.openapi = lambda: openapi_document(app, service.settings.model_name)  # type: ignore[method-assign]
    app.include_router(router)
    if service.settings.console:
        add_console(app, service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(GatewayMiddleware, service=service)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after", *RATE_HEADERS],
        )
    return app


def _response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error)


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _response(from_validation(error.errors()))


async def _http_error(_: Request, error: Exception) -> Response:
    """Starlette's own: no such path or method, a body that is no JSON at all."""
    assert isinstance(error, HTTPException)
    message = _HTTP_MESSAGES.get(error.status_code, "the request cannot be served")
    headers = dict(error.headers or {})
    return _response(ApiError(error.status_code, message, headers=headers))
