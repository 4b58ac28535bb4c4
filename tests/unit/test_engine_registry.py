"""From EngineArgs to an executor."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from pocket_backend.api import (
    BackendNotImplementedError,
    BackendUnavailableError,
    ConfigurationError,
    EngineArgs,
    ModelLoadError,
)
from pocket_backend.engine.build import build_backend
from pocket_backend.executors import registry
from pocket_backend.executors.fake import FakeExecutor

_EXECUTORS = "pocket_backend.executors"


def test_fake_takes_its_sizes_from_the_args() -> None:
    args = EngineArgs(
        model="fake",
        backend="fake",
        max_batch_size=3,
        max_num_batched_tokens=99,
        max_model_len=77,
        kv_cache_tokens=320,
        backend_options={"vocab_size": 300},
    )
    executor = registry.create_executor(args)
    assert isinstance(executor, FakeExecutor)
    memory = executor.get_memory_info()
    assert (memory.max_slots, memory.max_batch_tokens, memory.max_context) == (3, 99, 77)
    assert (memory.num_blocks, memory.vocab_size) == (20, 300)


def test_unknown_options_of_a_backend_are_refused() -> None:
    args = EngineArgs(model="fake", backend="fake", backend_options={"wings": 2})
    with pytest.raises(ConfigurationError, match="wings"):
        registry.create_executor(args)


def test_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith(f"{_EXECUTORS}.torch_")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(BackendUnavailableError, match=r"pocketllm\[torch\]"):
        registry.create_executor(EngineArgs(model="m", backend="torch"))


def test_an_unknown_backend_is_answered_with_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", {"fake": lambda _args: FakeExecutor()})
    with pytest.raises(BackendNotImplementedError, match=r"'torch'; available are fake"):
        registry.create_executor(EngineArgs(model="m", backend="torch"))


def test_auto_looks_at_the_file_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "model.bin"
    model.write_bytes(b"GGUF\x03\x00\x00\x00")
    with caplog.at_level(logging.INFO, "pocketllm"):
        assert registry.resolve_backend(EngineArgs(model=str(model))) == "cpp"
    [record] = caplog.records
    assert record.pocket_fields["reason"] == "the model is a GGUF file"  # type: ignore[attr-defined]
    assert registry.resolve_backend(EngineArgs(model="fake")) == "fake"


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04"])
def test_auto_refuses_what_it_does_not_know(tmp_path: Path, content: bytes | None) -> None:
    model = tmp_path / "model.bin"
    if content is not None:
        model.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.bin"):
        registry.create_executor(EngineArgs(model=str(model)))


def test_a_registered_backend_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    with pytest.raises(ConfigurationError, match="already"):
        registry.register_backend("fake", lambda _args: FakeExecutor())
    monkeypatch.delitem(registry._FACTORIES, "torch")
    registry.register_backend("torch", lambda _args: FakeExecutor())
    assert "torch" in registry.available_backends()
    assert registry.create_executor(EngineArgs(model="m", backend="torch"))


def test_an_executor_is_closed_if_its_tokenizer_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeExecutor] = []

    def make(_args: EngineArgs) -> FakeExecutor:
        made.append(FakeExecutor())
        return made[-1]

    monkeypatch.setattr(registry, "_FACTORIES", {"fake": make})
    args = EngineArgs(model="fake", backend="fake", tokenizer_path=str(tmp_path / "missing"))
    with pytest.raises(ModelLoadError):
        build_backend(args)
    assert made[0].closed
