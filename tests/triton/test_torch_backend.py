"""Models of the PyTorch backend, through the whole server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the torch extra")

import torch
from tiny_checkpoints import TOKENIZER_SIZE, Checkpoint, write_checkpoint, write_tokenizer
from triton_clients import at_baseline, control, post, wait_for
from triton_metrics import scrape

from pocket_backend import LLM, EngineArgs, SamplingParams
from pocket_backend.text import load_tokenizer
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports

PROMPT = "The first turn of a conversation: who are you, and what is all this about?"
STEM = 40
"""Bytes, which are tokens here: two whole blocks, which other prompts begin with, too."""
TOKENS = 16


def serve(model: Path, **environment: str) -> TritonServer:
    return TritonServer(
        ServerOptions(
            str(model),
            ports=Ports(0, 0, 0),
            log_file=model / "server.log",
            start_timeout=240,
            stop_timeout=5,
            environment={"POCKETLLM_THREADS": "1", **environment},
        )
    )


def ask(server: TritonServer, prompt: str) -> dict[str, Any]:
    body = {"text_input": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    status, data = post(f"{server.http_url}/v2/models/pocketllm/generate", body)
    assert status == 200, data
    return json.loads(data)


def greedy(checkpoint: Checkpoint, prompt: list[int], output: list[int]) -> list[int]:
    """What Transformers takes after ``prompt`` and each part of ``output``, without any cache."""
    with torch.no_grad():
        logits = checkpoint.model(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :, :TOKENIZER_SIZE].argmax(dim=1).tolist()


def test_a_hybrid_resumes_prefixes_from_saved_states(tmp_path: Path) -> None:
    qwen = write_checkpoint(tmp_path, "qwen3_5", seed=3)
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    turns = [PROMPT, PROMPT, PROMPT[:STEM] + " is over.", PROMPT[:STEM] + ", and so on."]
    with serve(tmp_path, POCKETLLM_BACKEND="torch") as server:
        before = scrape(server.metrics_url)
        replies = [ask(server, prompt) for prompt in turns]
        # The state was saved in the last block before the prompt's last token, and, once a second
        # prompt had branched off, where it did.
        assert [reply["num_cached_tokens"] for reply in replies] == [0, 64, 0, 32]
        assert replies[0]["token_ids"] == replies[1]["token_ids"]
        for prompt, reply in zip(turns, replies, strict=True):
            found = reply["token_ids"]
            assert len(found) == TOKENS
            assert found == greedy(qwen, tokenizer.encode(prompt), found)
        stats = control(server.http_url, {"stats": True})
        assert at_baseline(stats)
        hits = "pocket_state_snapshot_hits_total"
        wait_for(lambda: scrape(server.metrics_url)[hits] == stats["snapshot_hits"], 20, hits)
        after = scrape(server.metrics_url)
        assert after[hits] - before[hits] == 2
        saved = after['pocket_state_snapshots{state="saved"}']
        assert saved == after["pocket_state_snapshot_saves_total"] == stats["snapshots_saved"] >= 3
        # Two layers with a convolution over 96 channels and 4 heads of 16 x 8, in float32.
        assert after["pocket_state_snapshot_bytes"] == saved * 2 * 4 * (96 * 4 + 4 * 16 * 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "mamba2"])
def test_what_only_torch_runs_is_served_as_in_process(tmp_path: Path, name: str) -> None:
    """Twice importing torch, once in the server: far more than the model costs."""
    write_checkpoint(tmp_path, name)
    write_tokenizer(tmp_path)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with LLM(EngineArgs(model=str(tmp_path), threads=1)) as llm:
        [expected] = llm.generate(PROMPT, params)
    with serve(tmp_path) as server:
        assert ask(server, PROMPT)["text_output"] == expected.text
    log = (tmp_path / "server.log").read_text(errors="replace")
    assert "backend chosen backend=torch" in log
