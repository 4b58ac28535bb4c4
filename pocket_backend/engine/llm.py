"""``LLM``: offline generation in process, blocking calls over a ``UnifiedEngine``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self, cast

from pocket_backend.api import (
    ConfigurationError,
    EngineArgs,
    GenerationRequest,
    GenerationResult,
    InvalidRequestError,
    OverloadedError,
    SamplingParams,
    UnsupportedFeatureError,
)
from pocket_backend.engine.streams import ResultCollector, TokenStream
from pocket_backend.engine.unified import UnifiedEngine, new_request_id
from pocket_backend.engine.validation import token_tuple

if TYPE_CHECKING:
    from pocket_backend.api import BackendCapabilities
    from pocket_backend.observability.health import HealthStatus
    from pocket_backend.text.tokenizer import Tokenizer

MAX_PROMPTS = 1 << 20

Message = Mapping[str, object]
Prompts = str | Sequence[str] | Sequence[Sequence[int]]

# Documented names of the older API whose feature does not exist here (yet): refused by name.
_UNSUPPORTED_CHAT = (
    "reasoning",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "response_format",
)


def make_engine_args(
    args: EngineArgs | None, model: str | None, fields: Mapping[str, object]
) -> EngineArgs:
    """``EngineArgs`` from either form of the constructor, names of the older API included."""
    if args is not None:
        if not isinstance(args, EngineArgs):
            if isinstance(args, str) and model is None:
                return make_engine_args(None, args, fields)
            raise ConfigurationError("LLM: the first argument must be EngineArgs or a model path")
        if model is not None or fields:
            raise ConfigurationError("LLM: give either EngineArgs or single arguments, not both")
        return args
    if model is None:
        raise ConfigurationError("LLM: give EngineArgs, or model= with the path of a GGUF file")
    for name in fields:
        if name not in EngineArgs.__dataclass_fields__:
            raise ConfigurationError(f"LLM: unknown argument {name!r}")
    return EngineArgs(model=model, **fields)  # type: ignore[arg-type]


class LLM:
    """A model in this process.

    ::

        with LLM(EngineArgs(model="model.gguf")) as llm:
            [result] = llm.generate("The capital of France is", SamplingParams(max_tokens=16))

    Thread contract: all methods from any thread; requests of several threads share the batch.
    ``enable_batching=False`` runs one request at a time.
    """

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        model: str | None = None,
        engine: UnifiedEngine | None = None,
        **fields: object,
    ) -> None:
        """From ``EngineArgs``, from its fields (``model=...``), or on an ``engine`` that the caller
        keeps owning.

        Raises:
            ConfigurationError, ModelLoadError, BackendUnavailableError,
            BackendNotImplementedError: as ``UnifiedEngine.from_args``.
            UnsupportedFeatureError: an argument whose feature this version does not have.
        """
        self._owns_engine = engine is None
        if engine is None:
            engine = UnifiedEngine.from_args(make_engine_args(args, model, fields))
        self._engine = engine

    @property
    def engine(self) -> UnifiedEngine:
        return self._engine

    @property
    def capabilities(self) -> BackendCapabilities:
        """What the engine can do with its backend."""
        return self._engine.capabilities

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises UnsupportedFeatureError if the engine has none."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise UnsupportedFeatureError(
                "text prompts", "the engine has no tokenizer; use prompt_tokens"
            )
        return tokenizer

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_tokens: Sequence[int] | None = None,
    ) -> list[GenerationResult]:
        """Continue each prompt; results in the order of the prompts.

        Args:
            prompts: one string, several strings, or several lists of token ids.
            sampling_params: one for all, or one per prompt; None: greedy until the end.
            prompt_tokens: one prompt as token ids, instead of ``prompts``.

        With ``n`` above 1 the list has ``n`` results per prompt, in order.

        Raises:
            InvalidRequestError: before anything runs, if a prompt is empty, too long, ...
            PocketLLMError: the first failed request's error; the others are cancelled.
        """
        ids = self._prompt_ids(prompts, prompt_tokens)
        params = self._params(sampling_params, len(ids))
        requests = [self._request(tokens, p) for tokens, p in zip(ids, params, strict=True)]
        collectors = self._run(requests)
        return [result for collector in collectors for result in collector.results()]

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_tokens: Sequence[int] | None = None,
        request_id: str | None = None,
    ) -> TokenStream:
        """Continue one prompt; iterate over its ``TokenEvent``s. Closing the stream cancels.

        An event with ``error`` ends a failed request; iterating does not raise.
        """
        if (prompt is None) == (prompt_tokens is None):
            raise InvalidRequestError("prompt: give either prompt or prompt_tokens", field="prompt")
        given = prompt if prompt is not None else prompt_tokens
        assert given is not None
        return self._engine.stream(self.make_request(given, sampling_params, request_id))

    generate_stream = stream

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        **options: object,
    ) -> GenerationResult:
        """Answer a conversation (``[{"role": "user", "content": "..."}]``).

        Raises:
            InvalidRequestError: messages that the chat template refuses.
            UnsupportedFeatureError: ``tools`` and other options that this version does not have.
        """
        request = self.make_chat_request(
            messages, sampling_params, request_id, template_kwargs, options
        )
        if request.sampling_params.n > 1:
            raise InvalidRequestError.of("n", request.sampling_params.n, "chat gives one answer")
        [collector] = self._run([request])
        return collector.results()[0]

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        **options: object,
    ) -> TokenStream:
        """``chat``, as a stream of events."""
        return self._engine.stream(
            self.make_chat_request(messages, sampling_params, request_id, template_kwargs, options)
        )

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; False if none of that id is open."""
        return self._engine.cancel(request_id)

    def health(self) -> HealthStatus:
        return self._engine.health()

    def close(self) -> None:
        """Fail what is open and release the model (unless the engine was given). Idempotent."""
        if self._owns_engine:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, requests: Sequence[GenerationRequest]) -> list[ResultCollector]:
        """Run all, never more open at once than the engine's queue takes."""
        done: SimpleQueue[ResultCollector] = SimpleQueue()
        collectors = [ResultCollector(done.put) for _ in requests]
        waiting = deque(zip(requests, collectors, strict=True))
        window = max(1, self._engine.max_queue)
        open_ids: dict[ResultCollector, str] = {}
        try:
            while waiting or open_ids:
                while waiting and len(open_ids) < window:
                    request, collector = waiting[0]
                    try:
                        self._engine.submit(request, collector)
                    except OverloadedError:
                        if not open_ids:  # others fill the queue: nothing of ours will free it
                            raise
                        break
                    waiting.popleft()
                    open_ids[collector] = request.request_id
                finished = done.get()
                del open_ids[finished]
                finished.results()  # raises the request's error
        finally:
            for request_id in open_ids.values():
                self._engine.cancel(request_id)
        return collectors

    def _request(
        self, tokens: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> GenerationRequest:
        return GenerationRequest(
            request_id=request_id or new_request_id(),
            prompt_tokens=token_tuple(tokens),
            sampling_params=params,
        )

    def make_request(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None,
        request_id: str | None,
    ) -> GenerationRequest:
        """A request for one prompt (text or token ids)."""
        ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        [params] = self._params(sampling_params, 1)
        return self._request(ids, params, request_id)

    def make_chat_request(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        template_kwargs: Mapping[str, object] | None,
        options: Mapping[str, object],
    ) -> GenerationRequest:
        """A request for a conversation; ``options`` are refused by name."""
        for name, value in options.items():
            if name not in _UNSUPPORTED_CHAT:
                raise InvalidRequestError(f"{name}: chat has no such option", field=name)
            if value is not None:
                raise UnsupportedFeatureError(name, "not part of this version", field=name)
        ids = self.tokenizer.apply_chat_template(messages, template_kwargs=template_kwargs)
        [params] = self._params(sampling_params, 1)
        return self._request(ids, params, request_id)

    def _prompt_ids(
        self, prompts: Prompts | None, prompt_tokens: Sequence[int] | None
    ) -> list[Sequence[int]]:
        if (prompts is None) == (prompt_tokens is None):
            raise InvalidRequestError(
                "prompts: give either prompts or prompt_tokens", field="prompts"
            )
        if prompt_tokens is not None:
            return [prompt_tokens]
        assert prompts is not None
        if isinstance(prompts, str):
            return [self._encode(prompts)]
        if not isinstance(prompts, Sequence) or not 0 < len(prompts) <= MAX_PROMPTS:
            raise InvalidRequestError.of(
                "prompts", prompts, "must be a string, or a list of strings or of token id lists"
            )
        found: list[Sequence[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                found.append(self._encode(prompt))
            elif isinstance(prompt, Sequence):
                found.append(cast("Sequence[int]", prompt))
            else:
                raise InvalidRequestError.of(
                    "prompts", prompt, "each must be a string or a list of token ids"
                )
        return found

    def _encode(self, prompt: str) -> list[int]:
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise InvalidRequestError(
                "prompts: got an empty prompt; give at least one token", field="prompts"
            )
        return ids

    @staticmethod
    def _params(
        params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            return [SamplingParams()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(
                f"sampling_params: got {len(params)} for {count} prompts; give one, or one each",
                field="sampling_params",
            )
        return params
