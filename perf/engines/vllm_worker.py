"""vLLM on the CPU, offline, in one process; bf16 weights, since it does not read Q4_1."""

from __future__ import annotations

import time
from collections.abc import Mapping

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes
from perf.engines.worker import main


class VllmEngine:
    """See ``Engine``.  Environment variables are set by ``environments.py``."""

    name = "vllm"

    def __init__(self) -> None:
        self._llm: object | None = None

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        import vllm

        began = time.perf_counter()
        self._llm = vllm.LLM(
            model=options.model,
            dtype="bfloat16",
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=options.max_model_len,
            max_model_len=8192,
            enable_prefix_caching=options.prefix_caching,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **options.extra,
        )
        return {
            "version": vllm.__version__,
            "weights": "bf16",
            "load_seconds": time.perf_counter() - began,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        import vllm

        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        began = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)  # type: ignore[union-attr]
        wall = time.perf_counter() - began
        requests = []
        for output in outputs:
            metrics = output.metrics
            first = finished = None
            if metrics is not None and metrics.first_token_ts:
                first = metrics.first_token_latency
                finished = first + metrics.last_token_ts - metrics.first_token_ts
            ids = tuple(output.outputs[0].token_ids)
            requests.append(RequestTimes(ids, wall if finished is None else finished, first))
        return BatchResult(tuple(requests), wall)

    def close(self) -> None:
        self._llm = None


if __name__ == "__main__":
    main(VllmEngine)
