"""Log probabilities in OpenAI's two forms: of chat messages, and of text completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pocket_client.logprobs import TokenLogprobs, TokenScore

Json = dict[str, object]


def chat_logprobs(items: Sequence[TokenLogprobs], alternatives: int) -> Json:
    """``{"content": [...], "refusal": null}``, one entry for each token."""
    return {"content": [_chat_entry(item, alternatives) for item in items], "refusal": None}


def _chat_entry(item: TokenLogprobs, alternatives: int) -> Json:
    return {
        **_chat_score(item.chosen),
        "top_logprobs": [_chat_score(score) for score in item.top[:alternatives]],
    }


def _chat_score(score: TokenScore) -> Json:
    return {"token": score.token, "logprob": score.logprob, "bytes": list(score.bytes)}


@dataclass(slots=True)
class TextLogprobs:
    """The parallel lists of one choice of a text completion, or of one part of its stream.

    ``offset`` runs on from part to part: characters of the text before the next token. It counts
    complete characters, so the tokens of one character begin at the same place.
    """

    offset: int = 0
    _pending: bytes = b""
    _lists: Json = field(default_factory=dict)

    def take(
        self,
        items: Sequence[TokenLogprobs | None],
        alternatives: int,
        first_token: str = "",
    ) -> Json:
        """The lists of these tokens. ``first_token`` is the text of one that has no entry, which
        only the first token of an echoed prompt is."""
        texts: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for item in items:
            offsets.append(self.offset)
            if item is None:
                texts.append(first_token)
                values.append(None)
                tops.append(None)
                self._advance(first_token.encode())
                continue
            texts.append(item.chosen.token)
            values.append(item.chosen.logprob)
            # Of tokens that print alike, the likeliest stays.
            shown: dict[str, float] = {}
            for score in (*item.top[:alternatives], item.chosen):
                shown.setdefault(score.token, score.logprob)
            tops.append(shown)
            self._advance(item.chosen.bytes)
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops if alternatives else None,
            "text_offset": offsets,
        }

    def _advance(self, data: bytes) -> None:
        text = (self._pending + data).decode("utf-8", "ignore")
        self.offset += len(text)
        # What is left is an incomplete character: at most three bytes.
        self._pending = (self._pending + data)[len(text.encode()) :][-3:]


def echoed_first_token(prompt: str, items: Sequence[TokenLogprobs | None]) -> str:
    """Text of a prompt's first token: what the others leave of the prompt (nothing, if it is a
    begin-of-sequence token that the model added)."""
    rest = sum(len(item.chosen.bytes) for item in items if item is not None)
    data = prompt.encode()
    return data[: max(0, len(data) - rest)].decode("utf-8", "replace")
