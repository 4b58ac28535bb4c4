"""The endpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pocket_client.errors import PocketClientError
from pocket_client.gateway.errors import ApiError, from_upstream
from pocket_client.gateway.generation import GenerationResponse
from pocket_client.gateway.responses import ResponsesResponse, responses_generation
from pocket_client.gateway.responses_schema import ResponsesRequest
from pocket_client.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pocket_client.gateway.service import Service
from pocket_client.gateway.translate import chat_generation, completion_generation

router = APIRouter()
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")
_CALL_SECONDS = 30.0


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _trace(request: Request) -> Mapping[str, str]:
    """W3C trace context: of our own span, else the client's, passed on if it is well formed."""
    own: Mapping[str, str] | None = getattr(request.state, "trace_headers", None)
    if own is not None:
        return own
    parent = request.headers.get("traceparent", "")
    state = request.headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    if _TRACESTATE.fullmatch(state):
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


def _check_model(service: Service, model: str | None) -> None:
    if model is None or model == service.settings.model_name:
        return
    shown = model if len(model) <= 64 else f"{model[:64]}..."
    raise ApiError(
        404,
        f"the model {shown!r} does not exist; GET /v1/models lists what does",
        code="model_not_found",
        param="model",
    )


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service, tenant = _service(request), request.state.tenant
    _check_model(service, body.model)
    generation = chat_generation(body, tenant, _trace(request), service.settings.max_choices)
    return GenerationResponse(service, generation, tenant)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts, given as text or token ids."""
    service, tenant = _service(request), request.state.tenant
    _check_model(service, body.model)
    generation = completion_generation(body, tenant, _trace(request), service.settings.max_choices)
    return GenerationResponse(service, generation, tenant)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input of text; the answer is an object, or typed events."""
    service, tenant = _service(request), request.state.tenant
    _check_model(service, body.model)
    generation = responses_generation(body, tenant, _trace(request))
    return ResponsesResponse(service, body, generation, tenant)


@router.delete("/v1/requests/{request_id}")
async def cancel_request(request_id: str, request: Request) -> Response:
    """Cancel a generation under way, by its completion id or by the x-request-id it came with."""
    found = _service(request).registry.cancel(request.state.tenant, request_id)
    if not found:
        raise ApiError(404, "no request of that id is running", code="request_not_found")
    return JSONResponse({"id": request_id, "object": "request", "cancelled": found})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> Response:
    """One model by id."""
    service = _service(request)
    _check_model(service, model)
    return JSONResponse(_model(service))


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "pocketllm",
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of a conversation as the model would see it."""
    service = _service(request)
    _check_model(service, body.model)
    prompt = body.prompt if body.prompt is not None else body.messages
    try:
        ids = await service.client.tokenize(
            prompt, add_generation_prompt=body.add_generation_prompt, timeout=_CALL_SECONDS
        )
    except PocketClientError as error:
        raise from_upstream(error, {"text_input": "prompt"}) from None
    return JSONResponse({"count": len(ids), "tokens": ids})


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Text of token ids; special tokens are left out."""
    service = _service(request)
    _check_model(service, body.model)
    try:
        text = await service.client.detokenize(body.tokens, timeout=_CALL_SECONDS)
    except PocketClientError as error:
        raise from_upstream(error, {"token_ids": "tokens"}) from None
    return JSONResponse({"prompt": text})


@router.get("/health")
async def health() -> Response:
    """The gateway itself runs."""
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """A real inference succeeded just now."""
    problem = await _service(request).readiness.problem()
    if problem is not None:
        raise ApiError(503, f"the model server does not answer ({problem})", code="not_ready")
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The gateway's figures in Prometheus's text format."""
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
