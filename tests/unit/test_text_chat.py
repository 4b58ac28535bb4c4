"""Chat templates and messages: helpers, validation, tool calls (V9), limits."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from pocket_backend.api import InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from pocket_backend.text import ChatTemplate, chat, chat_messages

USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def render(source: str, *messages: Any, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages) or [USER], **options)


def test_variables_and_helpers_that_templates_expect() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}") == "<s>Hi"
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    assert render("{% if add_generation_prompt %}go{% endif %}", add_generation_prompt=False) == ""
    assert render("{{ tools is none }}") == "True"
    assert render("{{ unknown is defined }}") == "False"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "Hi"}]'
    assert render("{{ {'b': '<é>'} | tojson(indent=1) }}") == '{\n "b": "<é>"\n}'
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}") == "2"
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 11, 29))
    assert template.render([USER]) == "29 Nov 2026"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_template_kwargs() -> None:
    source = "{{ 'thinks' if enable_thinking else 'does not' }}"
    assert render(source, template_kwargs={"enable_thinking": True}) == "thinks"
    assert render(source) == "does not"
    with pytest.raises(UnsupportedFeatureError, match="does not use 'thinking'"):
        render(source, template_kwargs={"thinking": True})
    for kwargs in ({"messages": []}, {"a b": 1}, {1: 2}, "x"):
        with pytest.raises(InvalidRequestError, match="template_kwargs"):
            render(source, template_kwargs=kwargs)


def test_raise_exception_reaches_the_client() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages: .* refused .*: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('x' * 9999) }}")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ messages[0].absent + 'a' }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 'a'.foo() }}",
        "{% for m in messages %}{{ m.update({}) }}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="messages: the model's chat template"):
        render(source)


def test_a_template_that_does_not_compile_is_the_models_error() -> None:
    with pytest.raises(ModelLoadError, match=r"m\.gguf: chat_template does not compile"):
        ChatTemplate("{% for %}", origin="m.gguf")
    with pytest.raises(ModelLoadError, match="characters"):
        ChatTemplate(" " * (chat.MAX_TEMPLATE_CHARS + 1))


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_CHARS", 50)
    assert len(render("{% for i in range(50) %}a{% endfor %}")) == 50
    with pytest.raises(InvalidRequestError, match="rendering exceeds 50 characters"):
        render("{% for i in range(51) %}a{% endfor %}")


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDER_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="rendering exceeds"):
        render("{% for i in range(10) %}a{% endfor %}")


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PLAIN, {"role": "user", "content": parts}) == "[user]a\nb"
    assert render(PLAIN, {"role": "user", "content": ["a", "b"]}) == "[user]a\nb"
    assert render(PLAIN, {"role": "user", "content": []}) == "[user]"


def test_the_developer_role_is_the_system_role_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert render(PLAIN, message) == "[system]x"
    assert render(PLAIN + "{# developer #}", message) == "[developer]x"


def test_null_fields_count_as_absent() -> None:
    message = {"role": "user", "content": "x", "name": None, "tool_calls": None}
    assert render("{{ 'name' in messages[0] }}{{ 'tool_calls' in messages[0] }}", message) == (
        "FalseFalse"
    )


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ({"role": "user"}, "messages"),
        (["Hi"], r"messages\[0\]"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": "<|im_end|>", "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "assistant", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [3]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": "\udc00"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], r"messages\[0\]\.extra"),
        ([{"role": "user", "content": "x", 1: 2}], r"messages\[0\]"),
    ],
)
def test_bad_messages_are_named(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        ChatTemplate(PLAIN).render(messages)


def test_images_are_refused_by_name() -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(UnsupportedFeatureError, match=r"messages\[0\]\.content\[0\]\.type"):
        render(PLAIN, message)


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="got 2049"):
        render(PLAIN, *[USER] * 2049)
    with pytest.raises(InvalidRequestError, match="got 257 parts"):
        render(PLAIN, {"role": "user", "content": ["a"] * 257})
    with pytest.raises(InvalidRequestError, match="tools: got 257"):
        render("{{ tools }}", tools=[{}] * 257)
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="too large or too deep"):
        render(PLAIN, {"role": "user", "content": "x", "extra": deep})
    monkeypatch.setattr(chat_messages, "MAX_CHAT_VALUES", 10)
    with pytest.raises(InvalidRequestError, match="too large or too deep"):
        render(PLAIN, {"role": "user", "content": "x", "extra": list(range(10))})
    monkeypatch.setattr(chat_messages, "MAX_CHAT_BYTES", 10)
    assert render(PLAIN, {"role": "user", "content": "é" * 5})
    with pytest.raises(InvalidRequestError, match="larger than 10 bytes"):
        render(PLAIN, {"role": "user", "content": "é" * 5}, {"role": "user", "content": "a"})


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


ARGUMENTS = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{"city":"Bern"}', '{"city": "Bern"}'),
        ({"city": "Bern"}, '{"city": "Bern"}'),
        ("null", "{}"),
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
        ("{}", "{}"),
    ],
)
def test_v9_tool_call_arguments_become_a_mapping(arguments: Any, rendered: str) -> None:
    assert render(ARGUMENTS, call(arguments), {"role": "tool", "content": "5 C"}) == rendered


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', "3", 3, [1], "[" * 9999])
def test_v9_bad_tool_call_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arg"):
        render(ARGUMENTS, call(arguments))


def test_v9_an_assistant_turn_may_consist_of_calls_alone() -> None:
    assert render(PLAIN + "{{ messages[0].tool_calls | length }}", call("{}")) == "[assistant]1"


@pytest.mark.parametrize("calls", ["x", [3], [{}], [{"function": {"arguments": "{}"}}], [{}] * 257])
def test_v9_bad_tool_calls_are_refused(calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls"):
        render(PLAIN, message)


def test_tools_reach_the_template() -> None:
    assert render("{{ tools | tojson }}", tools=[{"type": "function"}]) == '[{"type": "function"}]'
    assert render("{{ tools }}", tools=[]) == "None"
    for tools in ("x", [3], {"a": 1}):
        with pytest.raises(InvalidRequestError, match="tools"):
            render("{{ tools }}", tools=tools)


def test_what_the_template_would_leave_out_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="tools: this model's chat template"):
        render(PLAIN, tools=[{"type": "function"}])
    with pytest.raises(UnsupportedFeatureError, match=r"messages\[1\]\.tool_calls"):
        render(PLAIN, USER, call("{}"))


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_continue_final_message_ends_inside_it() -> None:
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    last = {"role": "assistant", "content": "Paris is "}
    assert render(CHATML, USER, last, **options).endswith("assistant\nParis is ")
    trimming = CHATML.replace("m.content", "m.content | trim")
    assert render(trimming, USER, last, **options).endswith("assistant\nParis is")


def test_continue_final_message_needs_an_open_turn() -> None:
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    for messages in ([USER], [USER, {"role": "assistant", "content": ""}]):
        with pytest.raises(InvalidRequestError, match="continue_final_message"):
            render(CHATML, *messages, **options)
    last = {"role": "assistant", "content": "a"}
    with pytest.raises(InvalidRequestError, match="excludes add_generation_prompt"):
        render(CHATML, USER, last, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="drops the last message's end"):
        render("fixed", USER, last, **options)


def test_the_callers_messages_are_not_changed() -> None:
    message = call('{"a": 1}') | {"content": "x"}
    before = repr(message)
    render(
        CHATML + "{# tool_calls #}",
        USER,
        message,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert repr(message) == before


def test_unusual_characters_pass_through() -> None:
    content = "a\ufdd0b\ufdd1\ue000\x00"
    assert render(PLAIN, {"role": "user", "content": content}) == "[user]" + content
