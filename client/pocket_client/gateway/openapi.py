"""The OpenAPI document: FastAPI's, with our errors, the served model, and what is answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXT_OR_NULL = {"anyOf": [_TEXT, {"type": "null"}]}


def _object(**properties: object) -> dict[str, object]:
    """All of these are always there; more may be."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: object) -> dict[str, object]:
    return {"type": "array", "items": items}


_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL))
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT)
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_CHOICE = {"index": _COUNT, "finish_reason": _TEXT_OR_NULL}
_MESSAGE = _object(role={"const": "assistant"}, content=_TEXT)


def _answer(kind: str, **choice: object) -> dict[str, object]:
    choices = _list(_object(**_CHOICE, **choice))
    return _object(
        id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=choices, usage=_USAGE
    )


_EVENTS: dict[str, object] = {"text/event-stream": {}}
"""With ``stream: true``; OpenAPI 3.1 has no schema for single events."""
_FIGURES = {"type": "object", "additionalProperties": {"type": "number"}}
_NUMBERS = _list({"type": "number"})
_HISTOGRAM = {"anyOf": [_object(bounds=_NUMBERS, counts=_NUMBERS), {"type": "null"}]}
_ANSWERS: dict[str, tuple[object, dict[str, object]]] = {
    "/v1/chat/completions": (_answer("chat.completion", message=_MESSAGE), _EVENTS),
    "/v1/completions": (_answer("text_completion", text=_TEXT), _EVENTS),
    "/v1/responses": (
        _object(id=_TEXT, object={"const": "response"}, status=_TEXT, output=_list(_object())),
        _EVENTS,
    ),
    "/v1/requests/{request_id}": (_object(id=_TEXT, cancelled=_COUNT), {}),
    "/v1/models": (_object(object={"const": "list"}, data=_list(_MODEL)), {}),
    "/v1/models/{model}": (_MODEL, {}),
    "/tokenize": (_object(count=_COUNT, tokens=_list(_COUNT)), {}),
    "/detokenize": (_object(prompt=_TEXT), {}),
    "/health": (_object(status=_TEXT), {}),
    "/ready": (_object(status=_TEXT), {}),
    "/console/metrics": (
        _object(
            time={"type": "number"},
            model=_TEXT,
            engine={"anyOf": [_FIGURES, {"type": "null"}]},
            servers=_list(_object(healthy={"type": "boolean"}, open=_COUNT)),
            gateway=_FIGURES,
            latencies=_object(first_token=_HISTOGRAM, inter_token=_HISTOGRAM),
        ),
        {},
    ),
}
_RETRY_AFTER = {
    "Retry-After": {"schema": _TEXT, "description": "seconds; with 429 and most 503 answers"}
}


def openapi_document(app: FastAPI, model_name: str) -> dict[str, Any]:
    """Made once. 422, which FastAPI documents, is never sent."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for schema in schemas.values():
            _name_the_model(schema, model_name)
            _null_means_absent(schema)
        schemas["Error"] = _ERROR
        content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                responses = operation["responses"]
                responses.pop("422", None)
                responses["200"]["content"] = _content(path)
                responses["default"] = {
                    "description": "Error",
                    "content": content,
                    "headers": _RETRY_AFTER,
                }
        app.openapi_schema = document
    return app.openapi_schema


def _content(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"text/plain": {"schema": _TEXT}}
    schema, others = _ANSWERS[path]
    return {"application/json": {"schema": schema}, **others}


def _null_means_absent(schema: dict[str, Any]) -> None:
    for name, field in schema.get("properties", {}).items():
        choices = field.get("anyOf", [field])
        if name not in schema.get("required", ()) and {"type": "null"} not in choices:
            described = {key: field[key] for key in ("title", "default") if key in field}
            schema["properties"][name] = {"anyOf": [*choices, {"type": "null"}], **described}


def _name_the_model(schema: dict[str, Any], model_name: str) -> None:
    """Only one name is right, so a generated client or a fuzzer gets past the 404."""
    model = schema.get("properties", {}).get("model")
    if model is None:
        return
    for key in ("type", "maxLength", "minLength"):
        model.pop(key, None)
    if "anyOf" in model:
        model["anyOf"] = [{"const": model_name}, {"type": "null"}]
    else:
        model["const"] = model_name
