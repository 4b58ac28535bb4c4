"""The turns of a chat, and the file that they are saved in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pocket_backend.api import InvalidRequestError

_ROLES = frozenset({"system", "user", "assistant"})


@dataclass(slots=True)
class Conversation:
    """User and assistant turns alternate; a user turn without an answer is taken back."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[Mapping[str, object]]:
        """As a chat template takes them."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Remove the last question and its answer, if there is one; returns the question."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def save(self, path: Path, model: str) -> None:
        """Write ``{"model", "messages"}`` as JSON.

        Raises:
            InvalidRequestError: the file cannot be written.
        """
        text = json.dumps({"model": model, "messages": self.messages()}, ensure_ascii=False)
        try:
            path.expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"{path}: cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """What ``save`` wrote.

        Raises:
            InvalidRequestError: the file cannot be read, or holds something else.
        """
        try:
            content = json.loads(path.expanduser().read_text(encoding="utf-8"))
            messages = [(turn["role"], turn["content"]) for turn in content["messages"]]
        except OSError as error:
            raise InvalidRequestError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"{path}: is not a conversation that /save wrote") from None
        loaded = cls()
        for role, text in messages:
            if role not in _ROLES or not isinstance(text, str):
                raise InvalidRequestError(f"{path}: has a message of an unknown kind")
            if role == "system":
                loaded.system = text
            else:
                loaded.turns.append({"role": role, "content": text})
        return loaded
