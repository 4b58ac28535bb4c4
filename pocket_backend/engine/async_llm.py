"""``AsyncLLM``: the same engine for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from pocket_backend.api import EngineArgs, GenerationResult, SamplingParams, TokenEvent
from pocket_backend.engine.llm import LLM, Message
from pocket_backend.engine.streams import ResultCollector

if TYPE_CHECKING:
    from pocket_backend.api import GenerationRequest
    from pocket_backend.engine.unified import UnifiedEngine
    from pocket_backend.observability.health import HealthStatus


class AsyncTokenStream(AsyncIterator[TokenEvent]):
    """The events of one request for a consumer on an event loop.

    Like ``TokenStream``: the engine never waits, and what is unread is bounded by ``max_tokens``.
    ``aclose``, leaving ``async with``, dropping the stream, or cancelling the task that waits for
    the next event cancels the request.
    """

    def __init__(self, request: GenerationRequest, engine: UnifiedEngine) -> None:
        """Submit ``request``; raises as ``UnifiedEngine.submit``."""
        self.request_id = request.request_id
        self._engine = engine
        self._finished = True  # until the request is admitted
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._events = events

        def sink(event: TokenEvent) -> None:
            # Raises once the event loop is closed, which cancels the request.
            loop.call_soon_threadsafe(events.put_nowait, event)

        engine.submit(request, sink)
        self._finished = False

    async def __anext__(self) -> TokenEvent:
        if self._finished:
            raise StopAsyncIteration
        try:
            event = await self._events.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._finished = event.last
        return event

    def cancel(self) -> bool:
        """Ask the engine to end the request; its last event still comes."""
        return self._engine.cancel(self.request_id)

    async def aclose(self) -> None:
        """Stop reading; cancels the request unless its last event was read."""
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not getattr(self, "_finished", True):
            self._engine.cancel(self.request_id)


class AsyncLLM:
    """A model in this process, awaited. Construction loads the model and blocks.

    ::

        async with AsyncLLM(EngineArgs(model="model.gguf")) as llm:
            async for event in llm.stream("The capital of France is"):
                print(event.text, end="")

    All methods from tasks of any event loop; each stream belongs to the loop that made it.
    """

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        model: str | None = None,
        engine: UnifiedEngine | None = None,
        **fields: object,
    ) -> None:
        """As ``LLM``."""
        self._llm = LLM(args, model=model, engine=engine, **fields)

    @property
    def engine(self) -> UnifiedEngine:
        return self._llm.engine

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> GenerationResult:
        """Continue one prompt. Cancelling the task cancels the request.

        Raises:
            PocketLLMError: the request was refused or failed.
        """
        return await self._collect(self._llm.make_request(prompt, sampling_params, request_id))

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncTokenStream:
        """Continue one prompt; an async iterator over ``TokenEvent``. Submitted at the call."""
        return self._stream(self._llm.make_request(prompt, sampling_params, request_id))

    generate_stream = stream

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        **options: object,
    ) -> GenerationResult:
        """Answer a conversation, as ``LLM.chat``."""
        return await self._collect(
            self._llm.make_chat_request(
                messages, sampling_params, request_id, template_kwargs, options
            )
        )

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        **options: object,
    ) -> AsyncTokenStream:
        """``chat``, as an async iterator."""
        return self._stream(
            self._llm.make_chat_request(
                messages, sampling_params, request_id, template_kwargs, options
            )
        )

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; False if none of that id is open."""
        return self._llm.cancel(request_id)

    def health(self) -> HealthStatus:
        return self._llm.health()

    async def aclose(self) -> None:
        """``LLM.close`` without blocking the event loop. Idempotent."""
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _stream(self, request: GenerationRequest) -> AsyncTokenStream:
        return AsyncTokenStream(request, self.engine)

    async def _collect(self, request: GenerationRequest) -> GenerationResult:
        collector = ResultCollector()
        async for event in self._stream(request):
            collector(event)
        return collector.results()[0]
