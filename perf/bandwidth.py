"""How fast this machine reads memory: the roof over decoding.

A dot product of two halves of a buffer per thread reads everything once and does next to nothing
else; numpy asks for huge pages for such buffers and releases the GIL.  The best of several passes
is taken, since a limit is what the machine can do at best.  ``perf.bench_kernels`` measures the
same in C++ beside the kernels.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PASSES = 9


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second that ``threads`` threads read together from a set of ``set_bytes``."""

    set_bytes: int
    threads: int
    best: float
    median: float


def read_bandwidth(set_bytes: int, threads: int, passes: int = PASSES) -> Bandwidth:
    """Measure; takes ``passes`` times the time of reading ``set_bytes`` and little more.

    Buffers are allocated and touched by the thread that reads them.
    """
    per_thread = max(set_bytes // threads, 8) // 8
    start, end = threading.Barrier(threads + 1), threading.Barrier(threads + 1)

    def reader() -> None:
        halves = np.ones((2, per_thread), dtype=np.float32)
        for _ in range(passes):
            start.wait()
            np.dot(halves[0], halves[1])
            end.wait()

    workers = [threading.Thread(target=reader, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    rates = []
    for _ in range(passes):
        start.wait()
        began = time.perf_counter()
        end.wait()
        rates.append(per_thread * 8 * threads / (time.perf_counter() - began))
    for worker in workers:
        worker.join()
    return Bandwidth(per_thread * 8 * threads, threads, max(rates), float(np.median(rates)))


def bytes_per_decode_step(gguf: Path, mean_context: float, kv_bytes_per_token: float) -> float:
    """What one step of one sequence has to read: all weights of the file, and the KV so far.

    The file's own size of the tensors, not a repacked one: padding must not count as work.  A tied
    embedding is read once, as the output head.
    """
    return gguf_tensor_bytes(gguf) + mean_context * kv_bytes_per_token


def gguf_tensor_bytes(gguf: Path) -> int:
    """Bytes of tensor data: the file without its header."""
    from pocket_backend.text.gguf_metadata import GgufMetadata

    with GgufMetadata(gguf) as metadata:
        return gguf.stat().st_size - metadata.data_offset
