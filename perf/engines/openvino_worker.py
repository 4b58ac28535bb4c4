"""OpenVINO GenAI: ContinuousBatchingPipeline, which reads the GGUF and keeps it quantised."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import openvino
import openvino_genai as genai

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes
from perf.engines.worker import main

KV_BYTES_PER_TOKEN_MAX = 23040
"""f16, 30 layers x 3 KV heads x 64 x 2: what the pool is sized for (its own default is smaller)."""


class OpenVinoEngine:
    """See ``Engine``."""

    name = "openvino"

    def __init__(self) -> None:
        self._pipeline: genai.ContinuousBatchingPipeline | None = None
        self._next_id = 0

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = options.max_sequences
        scheduler.max_num_batched_tokens = options.max_model_len
        scheduler.enable_prefix_caching = options.prefix_caching
        scheduler.cache_size = -(-options.kv_cache_tokens * KV_BYTES_PER_TOKEN_MAX // 2**30)
        properties = {"INFERENCE_NUM_THREADS": options.threads, **options.extra}
        began = time.perf_counter()
        self._pipeline = genai.ContinuousBatchingPipeline(
            options.model, scheduler, "CPU", properties
        )
        return {
            "version": openvino.__version__,
            "weights": "the GGUF",
            "load_seconds": time.perf_counter() - began,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        pipeline = self._pipeline
        assert pipeline is not None
        config = genai.GenerationConfig()
        config.max_new_tokens = max_new_tokens
        config.ignore_eos = True
        config.do_sample = False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        began = time.perf_counter()
        handles = []
        for tensor in inputs:
            handles.append(pipeline.add_request(self._next_id, tensor, config))
            self._next_id += 1
        tokens: list[list[int]] = [[] for _ in handles]
        first: list[float | None] = [None] * len(handles)
        last = [0.0] * len(handles)
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - began
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[index].extend(output.generated_ids)
                    if first[index] is None:
                        first[index] = now
                    last[index] = now
        wall = time.perf_counter() - began
        requests = tuple(
            RequestTimes(tuple(ids), finished, start)
            for ids, finished, start in zip(tokens, last, first, strict=True)
        )
        return BatchResult(requests, wall)

    def close(self) -> None:
        self._pipeline = None


if __name__ == "__main__":
    main(OpenVinoEngine)
