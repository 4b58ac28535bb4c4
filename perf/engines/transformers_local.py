"""Transformers in this process: ``generate`` one request after the other, and its own continuous
batching. Both run on one model of the type that our PyTorch backend is given.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes, check_result


class OneByOne:
    """See ``Engine``. ``extra``: ``{"dtype": name}``."""

    name = "transformers generate"

    def __init__(self) -> None:
        self.model: Any = None

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        import torch
        import transformers

        torch.set_num_threads(options.threads)
        began = time.perf_counter()
        path = Path(options.model)
        where = {"gguf_file": path.name} if path.is_file() else {}
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent if where else path,
            dtype=getattr(torch, str(options.extra["dtype"])),
            attn_implementation="sdpa",
            **where,
        ).eval()
        self.model.generation_config.eos_token_id = None
        return {
            "version": transformers.__version__,
            "load_seconds": time.perf_counter() - began,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        import torch

        requests = []
        began = time.perf_counter()
        for prompt in prompts:
            inputs = torch.tensor([list(prompt)])
            with torch.inference_mode():
                output = self.model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    do_sample=False,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=0,
                )
            new = tuple(output[0, inputs.shape[1] :].tolist())
            requests.append(RequestTimes(new, time.perf_counter() - began))
        result = BatchResult(tuple(requests), time.perf_counter() - began)
        return check_result(self.name, result, len(prompts), max_new_tokens)

    def close(self) -> None:
        self.model = None


class ContinuousBatching:
    """``generate_batch`` on the model of ``base``, which has to be started before."""

    name = "transformers generate_batch"

    def __init__(self, base: OneByOne) -> None:
        self._base = base
        self._options = EngineOptions("")

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        self._options = options
        return {}

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        import torch
        import transformers

        page = 256
        config = transformers.ContinuousBatchingConfig(
            page_size=page,
            num_blocks=self._options.kv_cache_tokens // page,
            max_batch_tokens=512,
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        began = time.perf_counter()
        with torch.inference_mode():
            outputs = self._base.model.generate_batch(
                inputs=[list(prompt) for prompt in prompts],
                generation_config=generation,
                continuous_batching_config=config,
            )
        wall = time.perf_counter() - began
        found = [tuple(output.generated_tokens) for output in outputs.values()]
        result = BatchResult(tuple(RequestTimes(ids, wall) for ids in found), wall)
        return check_result(self.name, result, len(prompts), max_new_tokens)

    def close(self) -> None:
        return
