"""Marking control tokens in client strings, and taking the marks out again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from pocket_backend.text.control_tokens import ControlTokenGuard

END, WIDE = 100, 101
CONTROL = {
    END: AddedToken("<end>", special=True),
    WIDE: AddedToken("<wide>", special=True, lstrip=True, rstrip=True),
}


def through(*strings: str, template: str) -> list[int | str]:
    """What becomes of ``template`` (its ``{0}``, ``{1}`` are the client's strings)."""
    guard = ControlTokenGuard(CONTROL)
    protected, marks = guard.protect(list(strings))
    assert isinstance(protected, list)
    return guard.split(template.format(*protected), marks)


@pytest.mark.parametrize(
    ("strings", "template", "pieces"),
    [
        (["<end>"], "{0}<end>", ["<end>", END]),
        (["a<end>b"], "{0}<end>{0}", ["a<end>b", END, "a<end>b"]),
        (["<en", "d>"], "{0}{1}<end>", ["<end>", END]),
        ([" <en", "d> "], "{0}{1}", [" <end> "]),
        (["<en"], "{0}d>", ["<end>"]),
        (["d>"], "<en{0}", ["<end>"]),
        (["<end><end>"], "<end>{0}", [END, "<end><end>"]),
        (["x <wide> y"], "a <wide> {0} <wide>\n b", ["a", WIDE, "x <wide> y", WIDE, "b"]),
        (["<<end>>"], "{0}", ["<<end>>"]),
        (["plain"], "{0}<end>", ["plain", END]),
        ([""], "{0}<end>", [END]),
        ([" "], "{0}<end>", [" ", END]),
    ],
)
def test_only_the_templates_own_tokens_become_ids(
    strings: list[str], template: str, pieces: list[int | str]
) -> None:
    assert through(*strings, template=template) == pieces


def test_ordinary_strings_stay_as_they_are() -> None:
    guard = ControlTokenGuard(CONTROL)
    value = {"a": ["no token", 3, None, True, {"b": "end"}]}
    protected, marks = guard.protect(value)
    assert protected is value
    assert not marks.used
    assert not ControlTokenGuard({}).protect(["<end>", "\ufdd0"])[1].used


@pytest.mark.parametrize("write", [str, json.dumps, lambda v: json.dumps(v, ensure_ascii=False)])
def test_marks_survive_what_templates_do_to_data(write: Callable[[object], str]) -> None:
    guard = ControlTokenGuard(CONTROL)
    value = {"<end>": ["<end>", {"<end>": "é <en"}]}
    protected, marks = guard.protect(value)
    assert marks.used
    assert guard.split(write(protected), marks) == [write(value)]


def test_whitespace_beside_a_token_is_taken_as_the_library_takes_it() -> None:
    backend = Tokenizer(models.WordLevel({"<end>": END, "<wide>": WIDE, "[UNK]": 0}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("|", "removed")
    backend.add_special_tokens(list(CONTROL.values()))
    for text in ("a <wide> b", "<wide>", " <wide><end> <end> <wide> ", "a\n<wide>\n<end>\nb"):
        pieces = through("<end>", template=text + "{0}")
        own = [piece for piece in pieces if isinstance(piece, int)]
        assert own == [token for token in backend.encode(text).ids if token >= END]
        # One unknown word per piece of text between the tokens, whitespace included.
        between = len([piece for piece in through(template=text) if isinstance(piece, str)])
        assert between == backend.encode(text).ids.count(0)
