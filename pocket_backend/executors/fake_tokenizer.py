"""A tokenizer to go with the fake executor: one token per byte, so text works without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pocket_backend.api import InvalidRequestError
from pocket_backend.text.token_bytes import TokenBytes
from pocket_backend.text.tokenizer import Tokenizer

_BYTES = 256


class FakeTokenizer(Tokenizer):
    """Ids 1 to 255 stand for the byte of that value, ``eos_token_id`` is special, and ids from 256
    on are made-up words. A random output is full of broken UTF-8, which is what text needs tests
    against.
    """

    def __init__(self, vocab_size: int = _BYTES, eos_token_id: int = 0) -> None:
        table = [bytes([i]) if i < _BYTES else f" w{i}".encode() for i in range(vocab_size)]
        table[eos_token_id] = b"<eos>"
        self.special_ids = frozenset({eos_token_id})
        self.eos_token_ids = self.special_ids
        self.token_bytes = TokenBytes(table, self.special_ids)
        self.bos_token_id = None
        self.adds_bos = False
        self.chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens  # there is no BOS
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError.of("prompt", text, "must be Unicode text") from None
        for value in data:
            if value >= self.vocab_size or value in self.special_ids:
                raise InvalidRequestError.of(
                    "prompt", text, f"has byte {value}, which has no token"
                )
        return list(data)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        del continue_final_message, tools, template_kwargs
        if not messages:
            raise InvalidRequestError.of("messages", messages, "must have at least one message")
        lines = [f"{message.get('role')}: {message.get('content')}\n" for message in messages]
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))

    def token_to_id(self, token: str) -> int | None:
        if token == "<eos>":  # noqa: S105
            return next(iter(self.special_ids))
        data = token.encode("utf-8", "replace")
        return data[0] if len(data) == 1 and data[0] not in self.special_ids else None
