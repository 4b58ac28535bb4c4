"""llama.cpp through its C API: one context, one KV stream per sequence, static batches.

The library batches but does not schedule; this worker drives it as its own ``llama-batched-bench``
does (flash attention, KV not unified), on our prompts: its best case.  A prefix that all prompts of
a batch share is computed once and copied, and kept for the next batch; its server would not find it
among requests that arrive together.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
from llama_cpp import llama_cpp as lib

from perf.engines.base import BatchResult, EngineOptions, Prompts, RequestTimes
from perf.engines.worker import main

BATCH_TOKENS = 2048
"""Tokens per ``llama_decode`` call, cut into micro-batches of 512 by the library (its default)."""
MIN_SHARED_PREFIX = 64


class LlamaCppEngine:
    """See ``Engine``.  ``extra``: ``{"requantize": "Q4_0", "requantized": PATH}`` writes and uses
    the same weights as Q4_0, for which llama.cpp has its fastest kernels."""

    name = "llama.cpp"

    def __init__(self) -> None:
        self._model: object = None
        self._context: object = None
        self._prefix: tuple[int, ...] = ()

    def start(self, options: EngineOptions) -> Mapping[str, object]:
        lib.llama_backend_init()
        path = options.model
        if options.extra.get("requantize"):
            path = str(options.extra["requantized"])
            if not os.path.exists(path):  # noqa: PTH110
                _requantize(options.model, path)
        began = time.perf_counter()
        model_params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(path.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"cannot load {path}")
        self._prefix_caching = options.prefix_caching
        self._prefix_slot = options.max_sequences
        params = lib.llama_context_default_params()
        params.n_seq_max = options.max_sequences + 1
        params.n_ctx = params.n_seq_max * options.max_model_len
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("cannot create a context")
        self._memory = lib.llama_get_memory(self._context)
        vocab = lib.llama_model_get_vocab(self._model)
        self._vocab_size = lib.llama_vocab_n_tokens(vocab)
        self._batch = _Batch(BATCH_TOKENS)
        return {
            "version": _version(),
            "weights": str(options.extra.get("requantize", "the GGUF")),
            "load_seconds": time.perf_counter() - began,
        }

    def run(self, prompts: Prompts, max_new_tokens: int) -> BatchResult:
        began = time.perf_counter()
        done = self._share_prefix(prompts)
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt[done:], start=done)
        ]
        latest = [0] * len(prompts)
        for start in range(0, len(entries), BATCH_TOKENS):
            chunk = entries[start : start + BATCH_TOKENS]
            self._batch.fill(chunk)
            self._decode()
            for row, (_, _, sequence, wanted) in enumerate(chunk):
                if wanted:
                    latest[sequence] = self._greedy(row)
        first = time.perf_counter() - began
        tokens = [[token] for token in latest]
        for step in range(max_new_tokens - 1):
            positions = [len(prompt) + step for prompt in prompts]
            self._batch.fill([(latest[i], positions[i], i, True) for i in range(len(prompts))])
            self._decode()
            for row in range(len(prompts)):
                latest[row] = self._greedy(row)
                tokens[row].append(latest[row])
        wall = time.perf_counter() - began
        for sequence in range(len(prompts)):
            lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return BatchResult(tuple(RequestTimes(tuple(ids), wall, first) for ids in tokens), wall)

    def _share_prefix(self, prompts: Prompts) -> int:
        """Put the prompts' common prefix into every sequence; returns its length."""
        shared = _common_prefix(prompts) if len(prompts) > 1 and self._prefix_caching else 0
        if shared < MIN_SHARED_PREFIX:
            return 0
        prefix = tuple(prompts[0][:shared])
        if prefix != self._prefix:
            lib.llama_memory_seq_rm(self._memory, self._prefix_slot, -1, -1)
            for start in range(0, shared, BATCH_TOKENS):
                part = prefix[start : start + BATCH_TOKENS]
                self._batch.fill(
                    [(t, start + i, self._prefix_slot, False) for i, t in enumerate(part)]
                )
                self._decode()
            self._prefix = prefix
        for sequence in range(len(prompts)):
            lib.llama_memory_seq_cp(self._memory, self._prefix_slot, sequence, -1, -1)
        return shared

    def _decode(self) -> None:
        status = lib.llama_decode(self._context, self._batch.raw)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _greedy(self, row: int) -> int:
        pointer = lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(pointer, (self._vocab_size,)).argmax())

    def close(self) -> None:
        if self._context:
            lib.llama_free(self._context)
        if self._model:
            lib.llama_model_free(self._model)
        self._context = self._model = None


class _Batch:
    """Owns a ``llama_batch`` of single-sequence tokens."""

    def __init__(self, capacity: int) -> None:
        self.raw = lib.llama_batch_init(capacity, 0, 1)
        self._token = np.ctypeslib.as_array(self.raw.token, (capacity,))
        self._pos = np.ctypeslib.as_array(self.raw.pos, (capacity,))
        self._logits = np.ctypeslib.as_array(self.raw.logits, (capacity,))
        ids = ctypes.cast(self.raw.seq_id, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        for row in range(capacity):
            self.raw.n_seq_id[row] = 1
        self._sequence = [ids[row] for row in range(capacity)]

    def fill(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, logits wanted) per row."""
        count = len(entries)
        self.raw.n_tokens = count
        columns = np.array(entries, dtype=np.int32)
        self._token[:count] = columns[:, 0]
        self._pos[:count] = columns[:, 1]
        self._logits[:count] = columns[:, 3]
        for row, entry in enumerate(entries):
            self._sequence[row][0] = entry[2]


def _common_prefix(prompts: Prompts) -> int:
    """Tokens that all prompts start with, leaving each at least one of its own."""
    length = min(map(len, prompts)) - 1
    rows = np.array([prompt[:length] for prompt in prompts])
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else length


def _requantize(source: str, target: str) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype = lib.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    status = lib.llama_model_quantize(
        source.encode(), (target + ".partial").encode(), ctypes.byref(params)
    )
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    os.replace(target + ".partial", target)  # noqa: PTH105


def _version() -> str:
    import llama_cpp

    return f"llama-cpp-python {llama_cpp.__version__}"


if __name__ == "__main__":
    main(LlamaCppEngine)
