"""How fast this machine reads memory: the roof over decoding.

A dot product of two halves of a buffer per thread reads everything once and does next to nothing
else; numpy asks for huge pages for such buffers and releases the GIL.  The best of several passes
is taken, since a limit is what the machine can do at best.  ``perf.bench_kernels`` measures the
same in C++ beside the kernels.

``python -m perf.bandwidth BYTES THREADS`` measures and prints JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PASSES = 9
_BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""GGUF tensor types: elements and bytes of a block."""


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


def read_bandwidth_apart(set_bytes: int, threads: int, passes: int = PASSES) -> Bandwidth:
    """``read_bandwidth`` in a process of its own.

    There BLAS runs one thread per caller and chooses its kernel for this CPU, whatever this
    process's environment says.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-m", "perf.bandwidth", str(set_bytes), str(threads), str(passes)],
        cwd=Path(__file__).resolve().parent.parent,
        env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return Bandwidth(**json.loads(done.stdout))


def bytes_per_decode_step(gguf: Path, mean_context: float, kv_bytes_per_token: float) -> float:
    """What one step of one sequence has to read: all weights of the file, and the KV so far.

    The file's own size of the tensors, not a repacked one: padding must not count as work.  A tied
    embedding is read once, as the output head.
    """
    return gguf_tensor_bytes(gguf) + mean_context * kv_bytes_per_token


def gguf_tensor_bytes(gguf: Path) -> int:
    """Bytes of all tensors as they lie in the file.

    Raises:
        ValueError: a tensor type that is not in the table here.
    """
    from pocket_backend.text.gguf_metadata import GgufMetadata

    total = 0
    with GgufMetadata(gguf) as metadata:
        for tensor in metadata.tensors():
            if tensor.type_name not in _BLOCKS:
                raise ValueError(f"{gguf.name}: {tensor.name} is {tensor.type_name}")
            elements, size = _BLOCKS[tensor.type_name]
            total += math.prod(tensor.shape) // elements * size
    return total


if __name__ == "__main__":
    print(json.dumps(asdict(read_bandwidth(*map(int, sys.argv[1:])))))
