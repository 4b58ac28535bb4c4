"""What the bandwidth limit is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perf.bandwidth import (
    bytes_per_decode_step,
    gguf_tensor_bytes,
    read_bandwidth,
    read_bandwidth_apart,
)


def test_a_small_set_is_read_at_a_plausible_rate() -> None:
    measured = read_bandwidth(1 << 20, 2, passes=3)
    assert measured.set_bytes == 1 << 20
    assert 1e6 < measured.median <= measured.best < 1e13


def test_the_measurement_in_a_process_of_its_own_has_the_same_form() -> None:
    measured = read_bandwidth_apart(1 << 16, 1, passes=2)
    assert (measured.set_bytes, measured.threads) == (1 << 16, 1)
    assert measured.best >= measured.median > 0


def test_a_step_reads_tensors_and_the_kv_so_far(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.zeros((64, 32), dtype=np.float32))
    writer.add_tensor("b", np.zeros((32,), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_tensor_bytes(path) == 64 * 32 * 4 + 32 * 4
    assert bytes_per_decode_step(path, 100.0, 10.0) == gguf_tensor_bytes(path) + 1000.0
