"""The `Tokenizer` over a `tokenizers` backend: special tokens, one BOS, guarded chat encoding."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from pocket_backend.api.errors import InvalidRequestError
from pocket_backend.text.chat import ChatTemplate, no_chat_template
from pocket_backend.text.control_tokens import ControlTokenGuard
from pocket_backend.text.token_bytes import SPACE_MARK, TokenBytes
from pocket_backend.text.tokenizer import MAX_PROMPT_BYTES, Tokenizer


class BackendTokenizer(Tokenizer):
    """See ``Tokenizer``. ``prefix_ids`` and ``suffix_ids`` are what ``add_special_tokens`` adds."""

    def __init__(
        self,
        backend: Backend,
        token_bytes: TokenBytes,
        *,
        bos_token_id: int | None,
        eos_token_ids: frozenset[int],
        unk_token_id: int | None = None,
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.token_bytes = token_bytes
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_ids = token_bytes.special_ids
        self.adds_bos = bos_token_id is not None and bos_token_id in prefix_ids
        self.chat_template = chat_template
        self._backend = backend
        self._prefix = list(prefix_ids)
        self._suffix = list(suffix_ids)
        added = backend.get_added_tokens_decoder()
        control = {token_id: added[token_id] for token_id in self.special_ids if token_id in added}
        self._guard = ControlTokenGuard(control)
        # What text may legitimately become although it is special: the unknown token.
        self._forbidden = self.special_ids - {unk_token_id}
        self._literal: Backend | None = None
        self._literal_prefix_space = False
        self._literal_lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._encode_with(self._backend, text, "text_input")
        if not add_special_tokens:
            return ids
        return self._with_prefix(ids) + self._suffix

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        if self.chat_template is None:
            raise no_chat_template()
        pieces = self.chat_template.render_pieces(
            messages,
            self._guard,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        if isinstance(pieces, str):
            return self._with_prefix(self._encode_with(self._backend, pieces, "messages"))
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_literal(piece, at_start=index == 0)
        return self._with_prefix(ids)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _with_prefix(self, ids: list[int]) -> list[int]:
        if self.bos_token_id is not None and ids[:1] == [self.bos_token_id]:
            return ids  # the text or the template brought its own BOS
        return self._prefix + ids

    def _encode_with(self, backend: Backend, text: str, field: str) -> list[int]:
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"{field}: holds lone surrogates; send Unicode text", field=field
            ) from None
        if size > MAX_PROMPT_BYTES:
            raise InvalidRequestError(
                f"{field}: got {size} bytes; at most {MAX_PROMPT_BYTES} are accepted", field=field
            )
        return list(backend.encode(text, add_special_tokens=False).ids)

    def _encode_literal(self, text: str, *, at_start: bool) -> list[int]:
        """Encode with special tokens as ordinary text, as a piece of a longer text."""
        literal = self._literal_backend()
        if at_start and self._literal_prefix_space and not text.startswith((" ", SPACE_MARK)):
            text = " " + text
        ids = self._encode_with(literal, text, "messages")
        if not self._forbidden.isdisjoint(ids):
            raise InvalidRequestError(
                "messages: hold a control token that this tokenizer cannot write as ordinary "
                "text; remove it",
                field="messages",
            )
        return ids

    def _literal_backend(self) -> Backend:
        """A copy that does not recognise special tokens; built on first use, since only messages
        that spell a control token need it."""
        with self._literal_lock:
            if self._literal is None:
                copy = Backend.from_str(self._backend.to_str())
                copy.encode_special_tokens = True
                metaspace = copy.pre_tokenizer
                if (
                    isinstance(metaspace, pre_tokenizers.Metaspace)
                    and metaspace.prepend_scheme == "first"
                ):
                    # "first" would add a space to every piece, each being encoded by itself.
                    metaspace.prepend_scheme = "never"
                    copy.pre_tokenizer = metaspace
                    self._literal_prefix_space = True
                self._literal = copy
            return self._literal
