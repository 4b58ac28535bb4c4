"""Writes a GGUF's weights as a bf16 Hugging Face directory, for peers that cannot read the file.

Needs the ``torch`` extra; run as ``python -m perf.engines.dequantize FILE.gguf DIRECTORY``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def dequantize(gguf: Path, directory: Path) -> None:
    """Write model and tokenizer; the directory appears complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(directory)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
