"""Hugging Face Transformers ``generate``: bf16 weights, a static batch of equal-length prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes
from perf.engines.worker import main


class TransformersEngine:
    """See ``Engine``.  It has no prefix cache and does not tell when the first token came."""

    name = "transformers"

    def __init__(self) -> None:
        self._model: object | None = None

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        import torch
        import transformers

        torch.set_num_threads(options.threads)
        began = time.perf_counter()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16
        )
        model.generation_config.eos_token_id = None
        self._model = model.eval()
        return {
            "version": transformers.__version__,
            "weights": "bf16",
            "load_seconds": time.perf_counter() - began,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        import torch

        if len({len(prompt) for prompt in prompts}) != 1:
            raise ValueError("this adapter batches prompts of equal length only")
        inputs = torch.tensor([list(prompt) for prompt in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            outputs = self._model.generate(  # type: ignore[union-attr]
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
            )
        wall = time.perf_counter() - began
        new = outputs[:, inputs.shape[1] :].tolist()
        return BatchResult(tuple(RequestTimes(tuple(ids), wall) for ids in new), wall)

    def close(self) -> None:
        self._model = None


if __name__ == "__main__":
    main(TransformersEngine)
