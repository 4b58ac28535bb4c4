"""Checks a conversation and brings it into the form that chat templates expect.

Everything a template sees is rebuilt from plain JSON types: nothing of the caller's objects reaches
the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pocket_backend.api.errors import InvalidRequestError, UnsupportedFeatureError

MAX_MESSAGES = 2048
MAX_CONTENT_PARTS = 256
MAX_TOOLS = 256
MAX_CHAT_BYTES = 4 << 20
"""UTF-8 bytes of all strings of a request's messages, tools and template arguments."""
MAX_CHAT_VALUES = 200_000
"""JSON values in all of them together."""
MAX_DEPTH = 32

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""A role is written into the prompt unguarded, next to control tokens, so only known ones pass."""


class ChatInput:
    """Rebuilds a request's data under one common limit on size.

    Raises (all methods):
        InvalidRequestError: names the field, such as ``messages[2].content``, and the remedy.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._values = 0

    def messages(self, messages: object) -> list[dict[str, object]]:
        """Roles checked, text parts joined by newlines, nulls dropped, call arguments parsed."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
            raise InvalidRequestError.of("messages", messages, "must be a list of messages")
        if not 0 < len(messages) <= MAX_MESSAGES:
            raise InvalidRequestError(
                f"messages: got {len(messages)}; must be a list of 1 to {MAX_MESSAGES} messages",
                field="messages",
            )
        return [self._message(item, f"messages[{i}]") for i, item in enumerate(messages)]

    def tools(self, tools: object) -> list[object] | None:
        if tools is None:
            return None
        if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
            raise InvalidRequestError.of("tools", tools, "must be a list of tool definitions")
        if len(tools) > MAX_TOOLS:
            raise InvalidRequestError(
                f"tools: got {len(tools)}; at most {MAX_TOOLS} are accepted", field="tools"
            )
        for index, tool in enumerate(tools):
            if not isinstance(tool, Mapping):
                raise InvalidRequestError.of(f"tools[{index}]", tool, "must be an object")
        return [self.plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None

    def plain(self, value: object, where: str, depth: int = 0) -> object:
        """A copy made of dict, list, str, int, float, bool and None."""
        self._values += 1
        if self._values > MAX_CHAT_VALUES or depth > MAX_DEPTH:
            raise InvalidRequestError(
                f"{where}: is too large or too deep; at most {MAX_CHAT_VALUES} values, nested "
                f"{MAX_DEPTH} deep, are accepted",
                field=where,
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return self.text(value, where)
        if isinstance(value, Mapping):
            return {
                self._key(key, where): self.plain(item, f"{where}.{str(key)[:32]}", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        raise InvalidRequestError(
            f"{where}: is a {type(value).__name__}; must be JSON data", field=where
        )

    def text(self, value: str, where: str) -> str:
        try:
            self._bytes += len(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"{where}: holds lone surrogates; send Unicode text", field=where
            ) from None
        if self._bytes > MAX_CHAT_BYTES:
            raise InvalidRequestError(
                f"{where}: the conversation is larger than {MAX_CHAT_BYTES} bytes; shorten it",
                field=where,
            )
        return str(value)

    def _key(self, key: object, where: str) -> str:
        if not isinstance(key, str):
            raise InvalidRequestError.of(where, key, "names must be strings")
        return self.text(key, where)

    def _message(self, message: object, where: str) -> dict[str, object]:
        if not isinstance(message, Mapping):
            raise InvalidRequestError.of(where, message, "must be an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequestError.of(
                f"{where}.role", role, f"must be one of {', '.join(ROLES)}"
            )
        plain: dict[str, object] = {"role": role}
        for key, value in message.items():
            if key in ("role", "content", "tool_calls") or value is None:
                continue
            plain[self._key(key, where)] = self.plain(value, f"{where}.{str(key)[:32]}")
        calls = message.get("tool_calls")
        if calls is not None:
            plain["tool_calls"] = self._tool_calls(calls, f"{where}.tool_calls")
        content = message.get("content")
        if content is None and not (role == "assistant" and calls):
            raise InvalidRequestError.of(
                f"{where}.content", content, "must be a string or a list of text parts"
            )
        # Templates concatenate it, so an assistant turn that only calls tools has an empty one.
        plain["content"] = "" if content is None else self._content(content, f"{where}.content")
        return plain

    def _content(self, content: object, where: str) -> str:
        if isinstance(content, str):
            return self.text(content, where)
        if not isinstance(content, Sequence) or isinstance(content, bytes):
            raise InvalidRequestError.of(where, content, "must be a string or a list of text parts")
        if len(content) > MAX_CONTENT_PARTS:
            raise InvalidRequestError(
                f"{where}: got {len(content)} parts; at most {MAX_CONTENT_PARTS} are accepted",
                field=where,
            )
        return "\n".join(
            self._part(part, f"{where}[{index}]") for index, part in enumerate(content)
        )

    def _part(self, part: object, where: str) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise UnsupportedFeatureError(
                "content part", f"{where}.type: got {kind[:32]!r}; send text parts", field=where
            )
        if not isinstance(text, str):
            raise InvalidRequestError.of(where, part, 'must be {"type": "text", "text": "..."}')
        return self.text(text, where)

    def _tool_calls(self, calls: object, where: str) -> list[object]:
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise InvalidRequestError.of(where, calls, "must be a list of tool calls")
        if len(calls) > MAX_TOOLS:
            raise InvalidRequestError(
                f"{where}: got {len(calls)}; at most {MAX_TOOLS} are accepted", field=where
            )
        plain: list[object] = []
        for index, call in enumerate(calls):
            here = f"{where}[{index}]"
            copy = self.plain(call, here)
            if not isinstance(copy, dict):
                raise InvalidRequestError.of(here, call, "must be an object with a function")
            # Some clients send the function's fields without the wrapper.
            function = copy.get("function", copy)
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise InvalidRequestError.of(
                    f"{here}.function", function, "must be an object with name and arguments"
                )
            function["arguments"] = self._arguments(
                function.get("arguments"), f"{here}.function.arguments"
            )
            plain.append(copy)
        return plain

    def _arguments(self, arguments: object, where: str) -> object:
        """Clients send a JSON string, templates need a mapping: as a string, the model would learn
        to answer in escaped JSON. null and the empty string mean no arguments."""
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else None
            except (ValueError, RecursionError):
                raise InvalidRequestError(f"{where}: is not valid JSON", field=where) from None
        if arguments is None:
            return {}
        if not isinstance(arguments, dict):
            raise InvalidRequestError.of(where, arguments, "must be a JSON object")
        return self.plain(arguments, where)
