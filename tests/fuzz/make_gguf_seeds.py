"""Writes the seed corpus of the GGUF fuzzer: small valid files by gguf-py, and a few broken ones.

Run from the repository root: python tests/fuzz/make_gguf_seeds.py
The files are committed; `gguf_py.gguf` is also read by the C++ unit tests. Deterministic.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

CORPUS = Path(__file__).with_name("corpus") / "gguf"


def write(path: Path, *, alignment: int | None = None) -> None:
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<s>", "a", "b"])
    writer.add_token_types([3, 1, 1])
    writer.add_token_scores([0.0, -1.0, -2.5])
    writer.add_add_bos_token(True)
    rows = np.stack([np.arange(32, dtype=np.float32), np.full(32, -127, dtype=np.float32)])
    q8_0 = GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_q.weight", quantize(rows, q8_0), raw_dtype=q8_0)
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    CORPUS.mkdir(parents=True, exist_ok=True)
    valid = CORPUS / "gguf_py.gguf"
    write(valid)
    write(CORPUS / "aligned_8.gguf", alignment=8)
    data = valid.read_bytes()
    (CORPUS / "truncated.gguf").write_bytes(data[: len(data) // 2])
    (CORPUS / "huge_count.gguf").write_bytes(data[:8] + b"\xff" * 16 + data[24:])
    (CORPUS / "big_endian.gguf").write_bytes(data[:4] + data[4:8][::-1] + data[8:])
    (CORPUS / "version_2.gguf").write_bytes(data[:4] + (2).to_bytes(4, "little") + data[8:])


if __name__ == "__main__":
    main()
