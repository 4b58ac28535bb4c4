"""Ours: ``UnifiedEngine`` in this process, tokens in and tokens out like the peers' adapters.

Run as a module it is a worker too (``python -m perf.engines.pocketllm``): a fresh process is what
memory and load time are measured in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perf.engines.base import (
    BatchResult,
    EngineFailure,
    EngineOptions,
    Prompts,
    RequestTimes,
    check_result,
)
from perf.engines.step_times import StepTimes

if TYPE_CHECKING:
    from pocket_backend import UnifiedEngine
    from pocket_backend.api import TokenEvent

RUN_TIMEOUT_SECONDS = 300.0


class PocketLLMEngine:
    """See ``Engine``.

    ``extra`` are further fields of ``EngineArgs``; ``{"with_text": true}`` loads the tokenizer and
    runs the text stage as the Triton generator does; ``{"step_times": "gap"}`` or ``"parts"`` times
    the steps (``StepTimes``).
    """

    def __init__(self, name: str = "pocketllm") -> None:
        self.name = name
        self._engine: UnifiedEngine | None = None
        self._batches = 0
        self._times: StepTimes | None = None

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        began = time.perf_counter()
        import pocket_backend
        from pocket_backend.api import EngineArgs
        from pocket_backend.engine.unified import UnifiedEngine
        from pocket_backend.executors.registry import create_executor, resolve_backend

        extra = dict(options.extra)
        with_text = extra.pop("with_text", False)
        timed = extra.pop("step_times", None)
        args = EngineArgs(
            model=options.model,
            threads=options.threads,
            max_batch_size=options.max_sequences,
            max_model_len=options.max_model_len,
            kv_cache_tokens=options.kv_cache_tokens,
            enable_prefix_caching=options.prefix_caching,
            **extra,  # type: ignore[arg-type]
        )
        if with_text:
            self._engine = UnifiedEngine.from_args(args)
        else:
            self._engine = UnifiedEngine(
                create_executor(args),
                args.max_batch_size,
                options.kv_cache_tokens,
                max_num_batched_tokens=args.max_num_batched_tokens,
                max_model_len=args.max_model_len,
                enable_prefix_caching=args.enable_prefix_caching,
            )
        if timed is not None:
            self._times = StepTimes(self._engine, parts=timed == "parts")
        memory = self._engine.memory_info
        return {
            "version": pocket_backend.__version__,
            "backend": resolve_backend(args),
            "weights": "the GGUF",
            "load_seconds": time.perf_counter() - began,
            "weight_bytes": memory.weight_bytes,
            "kv_cache_bytes": memory.kv_cache_bytes,
            "workspace_bytes": memory.workspace_bytes,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        from pocket_backend.api import GenerationRequest, SamplingParams

        engine = self._engine
        if engine is None:
            raise EngineFailure(f"{self.name}: not started")
        self._batches += 1
        sampling = SamplingParams(max_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        requests = [
            GenerationRequest(f"bench-{self._batches}-{i}", tuple(prompt), sampling)
            for i, prompt in enumerate(prompts)
        ]
        collector = _Collector(len(requests))

        def submit_all() -> None:
            for index, request in enumerate(requests):
                try:
                    engine.submit(request, collector.sink(index))
                except Exception as error:  # noqa: BLE001  (raised again by `wait`)
                    collector.fail(error)
                    return

        collector.began = time.perf_counter()
        # On the engine thread, between two steps: the whole batch arrives at once, as in the peers'
        # adapters, and not in whatever pieces the interpreter's thread switches would cut it into.
        engine.post(submit_all)
        result = collector.wait()
        if self._times is not None:
            result = replace(result, step_seconds=self._times.take(len(prompts)))
        return check_result(self.name, result, len(prompts), max_new_tokens)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class _Collector:
    """Written by the engine thread, read by the caller once ``_done`` is set."""

    def __init__(self, requests: int) -> None:
        self.began = 0.0
        self._tokens: list[list[int]] = [[] for _ in range(requests)]
        self._first: list[float | None] = [None] * requests
        self._last = [0.0] * requests
        self._open = requests
        self._error: Exception | None = None
        self._done = threading.Event()

    def sink(self, index: int) -> Callable[[TokenEvent], None]:
        def take(event: TokenEvent) -> None:
            now = time.perf_counter() - self.began
            if event.token_ids:
                self._tokens[index].extend(event.token_ids)
                if self._first[index] is None:
                    self._first[index] = now
            if event.finish_reason is not None:
                self._last[index] = now
                if event.error is not None:
                    self.fail(event.error)
                self._open -= 1
                if self._open == 0:
                    self._done.set()

        return take

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> BatchResult:
        """Raises: EngineFailure for the first error of a request, or after the time limit."""
        if not self._done.wait(RUN_TIMEOUT_SECONDS):
            raise EngineFailure("pocketllm: the batch did not finish in time")
        if self._error is not None:
            raise EngineFailure(f"pocketllm: {self._error}") from self._error
        requests = tuple(
            RequestTimes(tuple(ids), last, first)
            for ids, last, first in zip(self._tokens, self._last, self._first, strict=True)
        )
        return BatchResult(requests, max(self._last))


if __name__ == "__main__":
    from perf.engines.worker import main

    main(PocketLLMEngine)
