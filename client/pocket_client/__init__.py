"""Client side of PocketLLM: speaks to the server over the wire and never imports the engine.

    from pocket_client import Client

    with Client("127.0.0.1:8001") as client:
        for chunk in client.stream("The capital of France is", max_tokens=16):
            print(chunk.text, end="", flush=True)

``Client`` and ``AsyncClient`` are the library; ``pocket_client.gateway`` is the OpenAI gateway
(the ``gateway`` extra), which the library never imports. docs/client.md and docs/gateway.md
describe them.
"""

from pocket_client.aio import AsyncClient, AsyncStream
from pocket_client.client import Client, Stream
from pocket_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PocketClientError,
    RequestCancelledError,
    ServerError,
    ShuttingDownError,
    UnavailableError,
    UnsupportedError,
)
from pocket_client.logprobs import TokenLogprobs, TokenScore
from pocket_client.options import GenerationOptions
from pocket_client.results import Chunk, Completion, FinishReason, Output, Usage
from pocket_client.retry import RetryPolicy

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "FinishReason",
    "GenerationOptions",
    "InvalidRequestError",
    "ModelNotFoundError",
    "Output",
    "OverloadedError",
    "PocketClientError",
    "RequestCancelledError",
    "RetryPolicy",
    "ServerError",
    "ShuttingDownError",
    "Stream",
    "TokenLogprobs",
    "TokenScore",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
]
