"""From ``EngineArgs`` to a loaded executor and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pocket_backend.executors.registry import create_executor, is_fake

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs
    from pocket_backend.executors.base import BackendExecutor
    from pocket_backend.text.tokenizer import Tokenizer


def build_tokenizer(args: EngineArgs, vocab_size: int, eos_token_id: int = 0) -> Tokenizer:
    """The tokenizer of ``args.model`` (or of ``args.tokenizer_path``); bytes for the fake model."""
    if is_fake(args) and args.tokenizer_path is None:
        from pocket_backend.executors.fake_tokenizer import FakeTokenizer

        return FakeTokenizer(vocab_size, eos_token_id)
    from pocket_backend.text.tokenizer import load_tokenizer

    return load_tokenizer(args.model_path(), args.tokenizer_path)


def build_backend(args: EngineArgs) -> tuple[BackendExecutor, Tokenizer]:
    """Both, or neither: an executor whose tokenizer does not load is closed again."""
    backend = create_executor(args)
    try:
        eos = min(backend.eos_token_ids, default=0)
        return backend, build_tokenizer(args, backend.get_memory_info().vocab_size, eos)
    except BaseException:
        backend.close()
        raise
