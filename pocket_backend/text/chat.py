"""Chat templates: from messages to the text that the model was trained on.

A template is Jinja code that comes with the model. It runs in Jinja's immutable sandbox, with the
helpers that Transformers gives it, over plain JSON data, under limits on output and time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pocket_backend.api.errors import InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from pocket_backend.text.chat_messages import MAX_CHAT_BYTES, ChatInput
from pocket_backend.text.control_tokens import ControlTokenGuard, Marks

MAX_TEMPLATE_CHARS = 1 << 20
MAX_RENDERED_CHARS = 4 * MAX_CHAT_BYTES
"""A template may repeat its inputs a few times (tool definitions, say), not without end."""
MAX_RENDER_SECONDS = 10.0
_MAX_MESSAGE_CHARS = 300
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def no_chat_template() -> InvalidRequestError:
    return InvalidRequestError(
        "messages: this model has no chat template; send text_input with the prompt written out, "
        "or serve the model with a tokenizer directory that has one",
        field="messages",
    )


class ChatTemplate:
    """A model's chat template, compiled once. Rendering is safe from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        origin: str = "chat template",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """``special_tokens``: names such as ``bos_token`` and their text, as templates use them.
        ``now`` is the clock behind ``strftime_now``.

        Raises:
            ModelLoadError: the template does not compile; names ``origin``.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelLoadError(
                f"{origin}: chat_template has {len(source)} characters, at most "
                f"{MAX_TEMPLATE_CHARS} are accepted"
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise ModelLoadError(f"{origin}: chat_template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as one string. To encode it, use ``Tokenizer.apply_chat_template``,
        which also keeps messages from forging control tokens.

        ``continue_final_message`` ends the text inside the last message instead of asking for a new
        one; it excludes ``add_generation_prompt``.

        Raises:
            InvalidRequestError: bad messages, or the template refused them (its own message).
            UnsupportedFeatureError: tools, tool calls or template_kwargs that the template would
                leave out.
        """
        rendered = self.render_pieces(
            messages,
            ControlTokenGuard({}),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return rendered if isinstance(rendered, str) else "".join(map(str, rendered))

    def render_pieces(
        self,
        messages: Sequence[Mapping[str, object]],
        guard: ControlTokenGuard,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, object]] | None,
        template_kwargs: Mapping[str, object] | None,
    ) -> str | list[int | str]:
        """As ``render``. A plain string if no message spells (part of) a control token; otherwise
        ids of the template's control tokens, and literal text in between."""
        reader = ChatInput()
        chat = reader.messages(messages)
        self._check_used(chat, tools, template_kwargs)
        if "developer" not in self.source:
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"  # the newer name of the same role
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError.of(
                "continue_final_message",
                True,
                "excludes add_generation_prompt: the last message is either open or finished",
            )
        data: dict[str, object] = {
            "messages": chat,
            "tools": reader.tools(tools),
            "extra": _template_kwargs(reader, template_kwargs),
        }
        protected, marks = guard.protect(data)
        assert isinstance(protected, dict)
        for message, original in zip(protected["messages"], chat, strict=True):
            message["role"] = original["role"]
        if continue_final_message:
            _open_last_message(protected["messages"], marks)
        rendered = self._render(protected, add_generation_prompt)
        if continue_final_message:
            rendered = _cut_at_open_end(rendered, marks)
        return guard.split(rendered, marks) if marks.used else rendered

    def _check_used(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        template_kwargs: Mapping[str, object] | None,
    ) -> None:
        """Refuse what the template would silently leave out of the prompt."""
        if tools and "tools" not in self._variables:
            raise UnsupportedFeatureError(
                "tools", "this model's chat template has no place for them", field="tools"
            )
        for index, message in enumerate(messages):
            if "tool_calls" in message and "tool_calls" not in self.source:
                field = f"messages[{index}].tool_calls"
                raise UnsupportedFeatureError(
                    "tool calls",
                    f"{field}: this model's chat template does not write them",
                    field=field,
                )
        for name in template_kwargs if isinstance(template_kwargs, Mapping) else ():
            if isinstance(name, str) and name not in self._variables and name not in _RESERVED:
                raise UnsupportedFeatureError(
                    "template_kwargs",
                    f"this model's chat template does not use {name[:32]!r}",
                    field="template_kwargs",
                )

    def _render(self, data: Mapping[str, Any], add_generation_prompt: bool) -> str:
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                **{
                    **self.special_tokens,
                    **data["extra"],
                    "messages": data["messages"],
                    "tools": data["tools"],
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            ):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                    raise InvalidRequestError(
                        f"messages: rendering exceeds {MAX_RENDERED_CHARS} characters or "
                        f"{MAX_RENDER_SECONDS:g} seconds; shorten the conversation",
                        field="messages",
                    )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # raise_exception lands here, and so do type errors of a template that expects fields
            # or kinds of messages which this conversation lacks.
            reason = str(error)[:_MAX_MESSAGE_CHARS] or type(error).__name__
            raise InvalidRequestError(
                f"messages: the model's chat template refused them: {reason}", field="messages"
            ) from error
        return "".join(parts)


def _template_kwargs(
    reader: ChatInput, template_kwargs: Mapping[str, object] | None
) -> dict[str, object]:
    if template_kwargs is None:
        return {}
    if not isinstance(template_kwargs, Mapping):
        raise InvalidRequestError.of("template_kwargs", template_kwargs, "must be an object")
    for name in template_kwargs:
        if not isinstance(name, str) or not name.isidentifier() or name in _RESERVED:
            raise InvalidRequestError.of(
                "template_kwargs", name, "names must be identifiers other than the template's own"
            )
    plain = reader.plain(template_kwargs, "template_kwargs")
    assert isinstance(plain, dict)
    return plain


def _open_last_message(messages: list[dict[str, object]], marks: Marks) -> None:
    """Mark the end of the last message; the space shows afterwards whether the template trims."""
    last = messages[-1]
    if last["role"] == "user" or not last["content"]:
        raise InvalidRequestError.of(
            "continue_final_message", True, "needs a last message of the assistant with content"
        )
    last["content"] = f"{last['content']}{marks.open_end} "


def _cut_at_open_end(rendered: str, marks: Marks) -> str:
    position = rendered.rfind(marks.open_end)
    if position < 0:
        raise InvalidRequestError.of(
            "continue_final_message", True, "the chat template drops the last message's end"
        )
    text = rendered[:position]
    return text if rendered.startswith(" ", position + len(marks.open_end)) else text.rstrip()


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's own text for training; here it renders as is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )

    def raise_exception(message: object) -> str:
        raise jinja2.TemplateError(str(message))

    def strftime_now(layout: str) -> str:
        return now().strftime(layout)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
