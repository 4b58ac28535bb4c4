"""A model that only the PyTorch backend runs, through the whole server."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

from tiny_checkpoints import write_checkpoint, write_tokenizer

from pocket_backend import LLM, EngineArgs, SamplingParams
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports

PROMPT = "Hello there"


@pytest.mark.slow
def test_gemma2_is_served_as_in_process(tmp_path: Path) -> None:
    """Twice importing torch, once in the server: far more than the model costs."""
    write_checkpoint(tmp_path, "gemma2")
    write_tokenizer(tmp_path)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with LLM(EngineArgs(model=str(tmp_path), threads=1)) as llm:
        [expected] = llm.generate(PROMPT, params)
    options = ServerOptions(
        str(tmp_path),
        ports=Ports(0, 0, 0),
        log_file=tmp_path / "server.log",
        start_timeout=240,
        environment={"POCKETLLM_THREADS": "1"},
    )
    body = {"text_input": PROMPT, "max_tokens": 16, "ignore_eos": True, "temperature": 0.0}
    with TritonServer(options) as server:
        request = urllib.request.Request(
            f"{server.http_url}/v2/models/pocketllm/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())
    assert found["text_output"] == expected.text
    assert options.log_file is not None
    assert "backend chosen backend=torch" in options.log_file.read_text(errors="replace")
