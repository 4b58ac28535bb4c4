"""Builds a tokenizer from the metadata of a GGUF file.

Vocabulary kinds: ``gpt2`` (byte-level BPE) and ``llama`` (SentencePiece BPE with byte fallback,
its merges recovered from the scores where the file lists none).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pocket_backend.api.errors import ModelLoadError, short_repr
from pocket_backend.text.backend_tokenizer import BackendTokenizer
from pocket_backend.text.chat import ChatTemplate
from pocket_backend.text.gguf_metadata import GgufMetadata
from pocket_backend.text.pre_tokenizers import SPLIT_SCHEMES
from pocket_backend.text.token_bytes import (
    SPACE_MARK,
    TokenBytes,
    byte_level_piece,
    sentencepiece_piece,
)

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>")
"""Control tokens that end an answer though older files name only EOS; counted where the model's
chat template writes them."""

_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3n")


def load_gguf_tokenizer(path: Path, pre: str | None = None) -> BackendTokenizer:
    """See ``load_tokenizer``."""
    with GgufMetadata(path) as metadata:
        return _Builder(metadata, pre).build()


class _Builder:
    def __init__(self, metadata: GgufMetadata, pre: str | None) -> None:
        self.metadata = metadata
        self.pre = pre
        self.kind = metadata.get_str(_PREFIX + "model")
        self.architecture = metadata.get_str("general.architecture") or ""
        self.tokens = self._tokens()
        self.types = self._types()
        self._drop_padding()
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if token and self.ids.setdefault(token, token_id) != token_id:
                self.fail(
                    f"tokens[{token_id}]: {short_repr(token)} is also token {self.ids[token]}"
                )

    def fail(self, message: str) -> NoReturn:
        raise ModelLoadError(f"{self.metadata.path}: {_PREFIX}{message}")

    def build(self) -> BackendTokenizer:
        if self.kind == "gpt2":
            backend, strip, adds_bos = self._byte_level()
            table = [byte_level_piece(token) for token in self.tokens]
        elif self.kind == "llama":
            backend, strip, adds_bos = self._sentencepiece()
            table = [sentencepiece_piece(token) for token in self.tokens]
        else:
            self.fail(f"model: {short_repr(self.kind)} is not supported; gpt2 and llama are")
        special = self._special_ids()
        backend.add_special_tokens(
            [
                AddedToken(self.tokens[token_id], normalized=False, special=True)
                for token_id in sorted(special)
            ]
        )
        plain = [
            token_id
            for token_id, kind in enumerate(self.types)
            if kind == _USER_DEFINED and self.tokens[token_id] and token_id not in special
        ]
        backend.add_tokens(
            [AddedToken(self.tokens[token_id], normalized=False) for token_id in plain]
        )
        for token_id in (*special, *plain):
            table[token_id] = self._added_bytes(self.tokens[token_id])
        for token_id, kind in enumerate(self.types):
            if kind == _UNUSED and token_id not in special:
                table[token_id] = b""
        return self._tokenizer(backend, TokenBytes(table, special, strip_leading_space=strip),
                               adds_bos)  # fmt: skip

    def _tokenizer(
        self, backend: Backend, token_bytes: TokenBytes, adds_bos: bool
    ) -> BackendTokenizer:
        bos, eos = self._id("bos_token_id"), self._id("eos_token_id")
        adds_bos = self._flag("add_bos_token", adds_bos)
        if adds_bos and bos is None:
            self.fail("bos_token_id: absent, but the tokenizer adds one")
        suffix = self._flag("add_eos_token", False)
        names = {"bos_token": bos, "eos_token": eos, "unk_token": self._id("unknown_token_id"),
                 "pad_token": self._id("padding_token_id")}  # fmt: skip
        special_tokens = {
            name: self.tokens[value] for name, value in names.items() if value is not None
        }
        source = self.metadata.get_str("tokenizer.chat_template")
        template = None
        if source is not None:
            template = ChatTemplate(source, special_tokens, origin=str(self.metadata.path))
        return BackendTokenizer(
            backend,
            token_bytes,
            bos_token_id=bos,
            eos_token_ids=self._eos_ids(source or ""),
            unk_token_id=names["unk_token"],
            prefix_ids=(bos,) if adds_bos and bos is not None else (),
            suffix_ids=(eos,) if suffix and eos is not None else (),
            chat_template=template,
        )

    def _byte_level(self) -> tuple[Backend, bool, bool]:
        name = self.pre if self.pre is not None else self.metadata.get_str(_PREFIX + "pre")
        remedy = f"pass pre= with the model's split, one of: {', '.join(sorted(SPLIT_SCHEMES))}"
        if name is None:
            self.fail(f"pre: absent; without it text would be split wrongly; {remedy}")
        scheme = SPLIT_SCHEMES.get(name)
        if scheme is None:
            self.fail(f"pre: {short_repr(name)} is unknown; {remedy}")
        lines = self.metadata.get_strings(_PREFIX + "merges")
        if lines is None:
            self.fail("merges: absent; byte-level BPE needs them")
        model = models.BPE(
            self.ids, self._split_merges(lines), fuse_unk=False, ignore_merges=scheme.ignore_merges
        )
        backend = Backend(model)
        backend.normalizer = scheme.normalizer()
        backend.pre_tokenizer = scheme.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend, False, scheme.adds_bos

    def _sentencepiece(self) -> tuple[Backend, bool, bool]:
        gemma = self.architecture in _GEMMA
        lines = self.metadata.get_strings(_PREFIX + "merges")
        if gemma:
            # Runs of spaces are stored as such, but looked up after spaces became U+2581.
            for token_id, token in enumerate(self.tokens):
                if token and not token.strip(" "):
                    self.tokens[token_id] = SPACE_MARK * len(token)
            self.ids = {token: token_id for token_id, token in enumerate(self.tokens) if token}
        merges = self._split_merges(lines) if lines is not None else self._merges_by_score(gemma)
        unknown = self._id("unknown_token_id")
        backend = Backend(
            models.BPE(
                self.ids,
                merges,
                fuse_unk=True,
                byte_fallback=True,
                unk_token=None if unknown is None else self.tokens[unknown],
            )
        )
        prefix = self._flag("add_space_prefix", not gemma)
        if gemma:
            backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
            backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        elif self.architecture == "phi3":
            # Phi-3's own tokenizer.json puts the prefix space in the normalizer.
            backend.normalizer = normalizers.Sequence(
                [normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)]
            )
        else:
            scheme = "first" if prefix else "never"
            backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, scheme, split=False)
        return backend, prefix, True

    def _split_merges(self, lines: Sequence[str]) -> list[tuple[str, str]]:
        ids, merges = self.ids, []
        for index, line in enumerate(lines):
            cut = line.find(" ", 1)  # from the second character on: a piece may be a space itself
            left, right = line[:cut], line[cut + 1 :]
            if cut < 0 or left not in ids or right not in ids or left + right not in ids:
                self.fail(f"merges[{index}]: {short_repr(line)} is not made of two known tokens")
            merges.append((left, right))
        return merges

    def _merges_by_score(self, by_position: bool) -> list[tuple[str, str]]:
        """Every way to split a piece into two pieces, best piece first.

        Source: how Transformers recovers merges from SentencePiece scores; Gemma's scores do not
        follow its merge order, the order of its vocabulary does. Control and byte pieces are not
        spelled by text and so are never merged.
        """
        scores = self.metadata.get_floats(_PREFIX + "scores")
        if by_position:
            scores = [-float(token_id) for token_id in range(len(self.tokens))]
        elif scores is None or len(scores) < len(self.tokens):
            self.fail("scores: absent or shorter than tokens; they give the order of merges")
        mergeable = {
            token: token_id
            for token, token_id in self.ids.items()
            if self.types[token_id] in (_NORMAL, _USER_DEFINED)
        }
        found = []
        for token, token_id in mergeable.items():
            score = scores[token_id]
            splits = [
                (mergeable[token[:cut]], mergeable[token[cut:]], token[:cut], token[cut:])
                for cut in range(1, len(token))
                if token[:cut] in mergeable and token[cut:] in mergeable
            ]
            found += [(score, len(left), len(right), left, right)
                      for _, _, left, right in sorted(splits)]  # fmt: skip
        found.sort(key=lambda item: item[:3], reverse=True)
        return [(left, right) for _, _, _, left, right in found]

    def _added_bytes(self, content: str) -> bytes:
        """Added tokens are matched as they are spelled, so they stand for their own UTF-8."""
        if self.kind == "llama":
            content = content.replace(SPACE_MARK, " ")
        return content.encode("utf-8", "surrogatepass")

    def _special_ids(self) -> frozenset[int]:
        control = {token_id for token_id, kind in enumerate(self.types) if kind == _CONTROL}
        named = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id",
                 "eot_token_id", "eom_token_id")  # fmt: skip
        control.update(token for name in named if (token := self._id(name)) is not None)
        return frozenset(token_id for token_id in control if self.tokens[token_id])

    def _eos_ids(self, template: str) -> frozenset[int]:
        named = (self._id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        found = {token_id for token_id in named if token_id is not None}
        for token in _TURN_ENDS:
            token_id = self.ids.get(token)
            if token_id is not None and self.types[token_id] == _CONTROL and token in template:
                found.add(token_id)
        return frozenset(found)

    def _id(self, name: str) -> int | None:
        value = self.metadata.get_int(_PREFIX + name)
        if value is not None and not 0 <= value < len(self.tokens):
            self.fail(f"{name}: {value} is not one of the {len(self.tokens)} tokens")
        return value

    def _flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get_bool(_PREFIX + name)
        return default if value is None else value

    def _tokens(self) -> list[str]:
        tokens = self.metadata.get_strings(_PREFIX + "tokens")
        if not tokens:
            self.fail("tokens: absent or empty; the file has no vocabulary")
        return tokens

    def _types(self) -> list[int]:
        types = self.metadata.get_ints(_PREFIX + "token_type")
        if types is None:
            return [_NORMAL] * len(self.tokens)
        if len(types) < len(self.tokens):
            self.fail(f"token_type: has {len(types)} entries for {len(self.tokens)} tokens")
        return types[: len(self.tokens)]

    def _drop_padding(self) -> None:
        """Converters fill the vocabulary up to the width of the logits with unused ``[PADn]``."""
        size = len(self.tokens)
        while size > 1 and self.types[size - 1] == _UNUSED and (
            self.tokens[size - 1] == f"[PAD{size - 1}]"
        ):  # fmt: skip
            size -= 1
        del self.tokens[size:], self.types[size:]
