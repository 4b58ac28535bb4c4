"""One streamed chat answer over gRPC, with the timings that a user feels."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pocket_backend.api.errors import BackendUnavailableError, EngineError

_FIRST_RESPONSE_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; times in seconds, on the client's clock."""

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float
    """From sending the request to the first text."""
    decode_seconds: float
    """From the first text to the end."""

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first over the time after the first."""
        return (self.output_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0


def stream_chat(
    address: str,
    messages: Sequence[dict[str, str]],
    *,
    max_tokens: int,
    on_text: Callable[[str], None],
    model: str = "pocketllm",
) -> Answer:
    """Ask, call ``on_text`` with each piece as it arrives, and return the whole.

    Raises:
        EngineError: the server answered with an error, or fell silent.
        BackendUnavailableError: tritonclient is not installed.
    """
    try:
        import numpy as np
        from tritonclient import grpc
    except ImportError as error:
        raise BackendUnavailableError(
            f"{error.name} is not installed: pip install 'tritonclient[grpc]'"
        ) from None

    def tensor(name: str, dtype: str, array: Any) -> Any:
        made = grpc.InferInput(name, list(array.shape), dtype)
        made.set_data_from_numpy(array)
        return made

    inputs = [
        tensor("messages", "BYTES", np.array([json.dumps(list(messages)).encode()], dtype=object)),
        tensor("stream", "BOOL", np.array([True])),
        tensor("max_tokens", "INT32", np.array([max_tokens], dtype=np.int32)),
    ]
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            sent = time.monotonic()
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            return _receive(answers, sent, on_text)
        finally:
            client.stop_stream(cancel_requests=True)


def _receive(
    answers: queue.SimpleQueue[tuple[Any, Any]], sent: float, on_text: Callable[[str], None]
) -> Answer:
    pieces: list[str] = []
    first: float | None = None
    finish_reason, prompt_tokens, output_tokens = "", 0, 0
    while True:
        try:
            result, error = answers.get(timeout=_FIRST_RESPONSE_TIMEOUT)
        except queue.Empty:
            raise EngineError("the server did not answer") from None
        if error is not None:
            raise EngineError(str(error.message()))
        if result.as_numpy("text_output") is not None:
            piece = result.as_numpy("text_output")[0].decode()
            if piece and first is None:
                first = time.monotonic()
            if piece:
                pieces.append(piece)
                on_text(piece)
            finish_reason = result.as_numpy("finish_reason")[0].decode()
            prompt_tokens = int(result.as_numpy("num_input_tokens")[0])
            output_tokens = int(result.as_numpy("num_output_tokens")[0])
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    ended = time.monotonic()
    begun = ended if first is None else first
    return Answer(
        "".join(pieces), finish_reason, prompt_tokens, output_tokens, begun - sent, ended - begun
    )
