"""The tokenizer contract, and ``load_tokenizer``, which builds one from a model.

All ids are plain ints. Implementations are immutable after construction; every method may be called
from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pocket_backend.api.errors import ModelLoadError
from pocket_backend.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from pocket_backend.text.chat import ChatTemplate


MAX_PROMPT_BYTES = 4 << 20
"""UTF-8 bytes of one prompt or rendered conversation: about a million tokens of ordinary text, a
few seconds of work for the tokenizer."""


class Tokenizer(ABC):
    """Text to ids and back.

    *BOS*: where the model wants one (``adds_bos``), every path gives exactly one: ``encode`` with
    ``add_special_tokens`` adds it unless the text itself begins with it, and so does
    ``apply_chat_template``.
    """

    token_bytes: TokenBytes
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    """Every id that ends an answer: EOS, end of turn, end of message, generation_config's list."""
    special_ids: frozenset[int]
    """Control tokens; they have no text when special tokens are skipped."""
    adds_bos: bool
    chat_template: ChatTemplate | None

    @property
    def vocab_size(self) -> int:
        """Valid ids are 0 .. vocab_size - 1, added tokens included, padding of the logits not."""
        return len(self.token_bytes)

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``. Special tokens spelled in it become their ids, so that prompts that are
        already templated work.

        Raises:
            InvalidRequestError: ``text`` is not Unicode text (lone surrogates) or too long.
        """

    @abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Render a conversation and encode it. Control tokens come from the template alone: one
        spelled inside a message is encoded as ordinary text.

        Raises:
            InvalidRequestError: bad messages, no chat template, or the template refused them.
        """

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole output, defined through ``token_bytes``: unknown ids are empty and bytes
        that are not UTF-8 become U+FFFD."""
        return self.token_bytes.decode(token_ids, skip_special_tokens)


def load_tokenizer(
    path: str | Path, tokenizer_path: str | Path | None = None, pre: str | None = None
) -> Tokenizer:
    """Build the tokenizer of a model.

    ``path`` is a GGUF file (the first part of a split model), or a directory with
    ``tokenizer.json`` or with one GGUF model; ``tokenizer_path``, if given, is used instead.
    ``pre`` overrides ``tokenizer.ggml.pre`` of a GGUF file: the name of the split that its
    byte-level BPE was trained with (``SPLIT_SCHEMES`` lists them).

    Raises:
        ModelLoadError: the file is missing or damaged, or its tokenizer is of an unknown kind
            (unknown or absent ``tokenizer.ggml.pre`` included); names the file and the key.
    """
    # Here, so that importing the package does not load the tokenizers library.
    from pocket_backend.text.gguf_files import gguf_models, gguf_parts, only_gguf_model
    from pocket_backend.text.gguf_tokenizer import load_gguf_tokenizer
    from pocket_backend.text.hf_tokenizer import load_hf_tokenizer

    source = Path(path if tokenizer_path is None else tokenizer_path).expanduser()
    if source.name == "tokenizer.json":
        source = source.parent
    elif source.is_dir() and not (source / "tokenizer.json").is_file() and gguf_models(source):
        source = only_gguf_model(source)
    if source.is_dir():
        if pre is not None:
            raise ModelLoadError(
                f"{source}: pre= is for GGUF files; tokenizer.json states its own split"
            )
        return load_hf_tokenizer(source)
    return load_gguf_tokenizer(gguf_parts(source)[0], pre)
