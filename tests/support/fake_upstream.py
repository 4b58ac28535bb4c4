"""A Triton server in this process, without Triton: scripted answers and faults, and a record.

It speaks the real protocol (the generated gRPC service of tritonclient), so the client library and
the gateway under test are unchanged. ``test_contract.py`` holds its manners against a real server.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

WORDS = ("Hello", ",", " wide", " wörld", "!")
WAIT = 60.0
"""Seconds until a wait is given up; never reached when all is well, however slow the machine."""


@dataclass
class Received:
    """One generation request, and what became of it."""

    id: str
    inputs: dict[str, Any]
    parameters: dict[str, Any]
    metadata: dict[str, str]
    context: grpc.ServicerContext
    over: threading.Event = field(default_factory=threading.Event)
    """Set when the RPC ended, whoever ended it."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set by ``release``: scripts wait for it."""
    cancelled: bool = False
    """By a control message."""
    output: int = 0
    """Which of the request's ``n`` outputs the script is asked for."""
    answered: bool = False
    """The last response was made. As in a real server this is so before the client can see it, so
    a client that has seen the end never finds its request still open."""

    @property
    def stream(self) -> bool:
        return bool(self.parameters["stream"])

    def wait(self) -> None:
        """Block the script until ``release``, a cancellation, or the end of the RPC."""
        deadline = time.monotonic() + WAIT
        while not (self.released.is_set() or self.over.is_set() or self.cancelled):
            assert time.monotonic() < deadline, "nobody released this request"
            time.sleep(0.002)

    @property
    def open(self) -> bool:
        return not (self.answered or self.cancelled or self.over.is_set())


Step = tuple[str, Any]
Script = Callable[[Received], Iterator[Step]]


def words(received: Received) -> Iterator[Step]:
    """The default script: some words, cut by ``max_tokens``."""
    limit = received.parameters.get("max_tokens") or len(WORDS)
    count = min(limit, len(WORDS))
    for i, word in enumerate(WORDS[:count]):
        last = i == count - 1
        reason = ("length" if count < len(WORDS) else "stop") if last else ""
        yield "chunk", (word, (i + 1,), reason)


def two_then_wait(received: Received) -> Iterator[Step]:
    """Two chunks, then nothing until released; then the end."""
    yield "chunk", ("one", (1,), "")
    yield "chunk", (" two", (2,), "")
    received.wait()
    yield "chunk", (" end", (3,), "stop")


def wait_first(received: Received) -> Iterator[Step]:
    """Nothing at all until released: a request that is queued or prefills."""
    received.wait()
    yield "chunk", ("late", (1,), "stop")


def failing(*steps: Step) -> Script:
    """A script of fixed steps: ``("error", text)``, ``("abort", (code, details))``, chunks."""
    return lambda _received: iter(steps)


class FakeUpstream(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Thread-safe. ``script`` decides about requests that arrive from then on."""

    def __init__(self) -> None:
        self.script: Script = words
        self.received: list[Received] = []
        self.controls: list[dict[str, Any]] = []
        self.stats: Callable[[], dict[str, Any]] = lambda: {"running": 0}
        """The answer to a control message that asks for them."""
        self.connections: set[str] = set()
        self._changed = threading.Condition()
        self._controls_open = threading.Event()
        self._controls_open.set()
        self._server = grpc.server(futures.ThreadPoolExecutor(160))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        for received in self.received:
            received.over.set()
        self._server.stop(0.2).wait()

    def wait_for(self, condition: Callable[[], bool], what: str = "") -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT), f"never happened: {what}"

    def wait_for_requests(self, count: int) -> list[Received]:
        self.wait_for(lambda: len(self.received) >= count, f"{count} requests")
        return self.received

    def release(self) -> None:
        for received in self.received:
            received.released.set()

    def settle(self) -> None:
        """Release every request and wait for the end of its RPC: no test meets another's."""
        self.release()
        self.wait_for(lambda: all(r.over.is_set() for r in self.received), "all RPCs ended")

    @contextmanager
    def controls_held(self) -> Iterator[None]:
        """Inside, control messages arrive but get no answer until the end of the block."""
        self._controls_open.clear()
        try:
            yield
        finally:
            self._controls_open.set()

    @property
    def cancelled_ids(self) -> list[str]:
        return [c["cancel_request_id"] for c in self.controls if "cancel_request_id" in c]

    # --- the service --------------------------------------------------------------------------

    def ModelStreamInfer(  # noqa: N802  (the protocol's name)
        self, requests: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        self.connections.add(context.peer())
        for request in requests:
            inputs = _inputs(request)
            if request.model_name == "pocketllm":
                yield from self._generate(request, inputs, context)
            else:
                yield self._call(request.model_name, inputs)

    def _generate(
        self, request: Any, inputs: dict[str, Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        parameters = json.loads(inputs.pop("sampling_parameters"))
        metadata = dict(context.invocation_metadata())
        received = Received(request.id, inputs, parameters, metadata, context)
        if not context.add_callback(lambda: self._note(received.over.set)):
            received.over.set()  # the client was gone before this thread got its turn
        self._note(lambda: self.received.append(received))
        prompt = inputs.get("text_input") or inputs.get("messages") or ""
        prompt_tokens = len(inputs.get("input_ids") or str(prompt).split())
        answer = Answer(parameters, {output.name for output in request.outputs}, prompt_tokens)
        wholes: list[tuple[Any, ...]] = []
        outputs = parameters.get("n", 1)
        for kind, value in self._steps(received):
            if received.cancelled:
                received.answered = True
                yield _error(f"in ensemble 'pocketllm', request '{request.id}': cancelled")
                return
            if kind == "error":
                received.answered = True
                yield _error(value)
                return
            if kind == "abort":
                received.answered = True
                context.abort(*value)
            if kind == "empty":
                yield service_pb2.ModelStreamInferResponse()
                continue
            if kind == "raw":
                yield value
                continue
            part = (received.output, *value)
            if not received.stream:
                wholes.append(part)
                continue
            received.answered = bool(value[2]) and received.output == outputs - 1
            yield answer.response([part])
        if wholes:
            received.answered = True
            yield answer.response(wholes)

    def _steps(self, received: Received) -> Iterator[Step]:
        """The script's steps for each of the request's outputs, one output after the other."""
        for index in range(received.parameters.get("n", 1)):
            received.output = index
            steps = self.script(received)
            yield from steps if received.stream else _summed(steps)

    def _call(self, model: str, inputs: Mapping[str, Any]) -> Any:
        if model == "tokenizer":
            if "text_input" in inputs and not inputs["text_input"]:
                return _error("text_input: must not be empty")
            text = inputs.get("text_input") or inputs["messages"]
            return _response([("input_ids", list(text.encode()))])
        if model == "detokenizer":
            return _response(
                [
                    (
                        "text_output",
                        bytes(i % 256 for i in inputs["token_ids"]).decode(errors="replace"),
                    )
                ]
            )
        assert self._controls_open.wait(WAIT)
        control = json.loads(inputs["control"])
        found = 0
        if "cancel_request_id" in control:
            for received in self.received:
                if received.id == control["cancel_request_id"] and received.open:
                    received.cancelled = True
                    found += 1
        self._note(lambda: self.controls.append(control))
        result = {"cancelled": found} if "cancel_request_id" in control else self.stats()
        return _response([("control_result", json.dumps(result))])

    def _note(self, change: Callable[[], Any]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()


def _summed(steps: Iterator[Step]) -> Iterator[Step]:
    """One response for all, as for stream=false."""
    text, ids = "", ()
    for kind, value in steps:
        if kind != "chunk":
            yield kind, value
            return
        text, ids = text + value[0], ids + tuple(value[1])
        if value[2]:
            yield "chunk", (text, ids, *value[2:])


def _inputs(request: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values[tensor.name] = raw[4:].decode()
        elif tensor.datatype == "BOOL":
            values[tensor.name] = raw == b"\1"
        else:
            values[tensor.name] = list(struct.unpack(f"<{len(raw) // 4}i", raw))
    return values


class Answer:
    """Builds the responses of one request, with the outputs that it asked for."""

    def __init__(
        self, parameters: Mapping[str, Any], wanted: Collection[str], prompt_tokens: int
    ) -> None:
        self._parameters = parameters
        self._wanted = wanted
        self._prompt_tokens = prompt_tokens
        self._sent: Counter[int] = Counter()
        self._cumulative: Counter[int] = Counter()
        self._prompt_sent = False

    def response(self, parts: list[tuple[Any, ...]]) -> Any:
        """``parts``: (output, text, ids, finish reason, stop reason or nothing) of each."""
        outputs, texts, ids, reasons, *stops = zip(*parts, strict=True)
        for output, tokens in zip(outputs, ids, strict=True):
            self._sent[output] += len(tokens)
            self._cumulative[output] -= sum(tokens)
        cached = self._prompt_tokens // 2 if any(reasons) else 0
        values: list[tuple[Any, ...]] = [
            ("num_cached_tokens", [cached], "UINT32"),
            ("num_input_tokens", [self._prompt_tokens], "UINT32"),
            ("stop_reason", list(stops[0]) if stops else [""] * len(parts)),
            ("finish_reason", list(reasons)),
            ("num_output_tokens", [self._sent[output] for output in outputs], "UINT32"),
            ("token_ids", [token for tokens in ids for token in tokens]),
            ("text_output", list(texts)),
            ("sequence_index", list(outputs)),
            ("logprobs", self._logprobs(texts, ids)),
            ("cumulative_logprob", [float(self._cumulative[o]) for o in outputs], "FP32"),
            ("prompt_logprobs", self._prompt()),
            ("timings", [json.dumps({"ttft_seconds": 0.5})] * len(parts) if all(reasons) else []),
        ]
        return _response([value for value in values if value[0] in self._wanted])

    def _logprobs(self, texts: Sequence[str], ids: Sequence[tuple[int, ...]]) -> list[str]:
        count = self._parameters.get("logprobs") or 0
        return [
            json.dumps(
                [
                    # A whole answer is one of `words`, whose token i + 1 is word i.
                    logprob_entry(token, WORDS[token - 1] if len(tokens) > 1 else text, count)
                    for token in tokens
                ]
            )
            for text, tokens in zip(texts, ids, strict=True)
        ]

    def _prompt(self) -> list[str]:
        """Once: a prompt of n tokens is "word word ..."."""
        if self._prompt_sent:
            return []
        self._prompt_sent = True
        count = self._parameters.get("prompt_logprobs") or 0
        entries = [logprob_entry(i, " word", count) for i in range(1, self._prompt_tokens)]
        return [json.dumps([None, *entries])]


def logprob_entry(token: int, text: str, alternatives: int) -> dict[str, Any]:
    """Token i has the log probability -i and is none of the likeliest, which are at 0."""
    scores = {str(token): (float(-token), None, text)}
    for rank in range(1, alternatives + 1):
        scores[str(1000 + rank)] = (0.0, rank, f"<{rank}>")
    return {
        name: {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": piece,
            "bytes": list(piece.encode()),
        }
        for name, (logprob, rank, piece) in scores.items()
    }


def chunk_response(
    text: str, ids: tuple[int, ...], reason: str, stop: str, prompt_tokens: int, sent: int
) -> Any:
    return _response(
        [
            ("num_cached_tokens", [prompt_tokens // 2 if reason else 0], "UINT32"),
            ("num_input_tokens", [prompt_tokens], "UINT32"),
            ("stop_reason", stop),
            ("finish_reason", reason),
            ("num_output_tokens", [sent], "UINT32"),
            ("token_ids", list(ids)),
            ("text_output", text),
        ]
    )


def _response(outputs: list[tuple[Any, ...]]) -> Any:
    response = service_pb2.ModelStreamInferResponse()
    inner = response.infer_response
    for name, value, *kind in outputs:
        items = [value] if isinstance(value, str) else value
        if kind or name in ("token_ids", "input_ids", "sequence_index"):
            datatype = kind[0] if kind else "INT32"
            code = "f" if datatype == "FP32" else "i"
            inner.raw_output_contents.append(struct.pack(f"<{len(items)}{code}", *items))
        else:
            datatype = "BYTES"
            encoded = [item.encode() for item in items]
            packed = b"".join(struct.pack("<I", len(data)) + data for data in encoded)
            inner.raw_output_contents.append(packed)
        inner.outputs.add(name=name, datatype=datatype, shape=[len(items)])
    return response


def _error(message: str) -> Any:
    return service_pb2.ModelStreamInferResponse(error_message=message)
