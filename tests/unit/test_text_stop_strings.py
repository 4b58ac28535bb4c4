"""Stop strings, named after the cases that users reported."""

from __future__ import annotations

import itertools

import pytest

from pocket_backend.api import InvalidRequestError, SamplingParams
from pocket_backend.text import OutputText, TextChunk, TokenBytes
from pocket_backend.text.stop_strings import StopMatcher, _Pattern


def run(pieces: list[str], **options: object) -> tuple[list[str], TextChunk, OutputText]:
    """Push each piece as a token: texts sent before the last chunk, the last chunk, the output."""
    table = TokenBytes([piece.encode() for piece in pieces])
    output = OutputText(table, **options)  # type: ignore[arg-type]
    sent = []
    for token in range(len(pieces)):
        chunk = output.push(token)
        if chunk is not None:
            sent.append(chunk.text)
        if output.stopped is not None:
            break
    return sent, output.finish(), output


def test_d6_nothing_of_a_stop_string_is_streamed() -> None:
    sent, last, output = run(list("DEFGHIJKLM"), stop=["DEFGHIJ"])
    assert (sent, last.text, output.stopped) == ([], "", "DEFGHIJ")
    assert last.token_ids == tuple(range(7)), "tokens that complete the stop string are reported"


def test_d6_a_stop_string_may_begin_and_end_inside_tokens() -> None:
    sent, last, output = run(["ab STO", "P cd", "ef"], stop=["STOP"])
    assert (sent, last.text, output.stopped) == (["ab "], "", "STOP")
    assert (last.token_ids, last.context_ids, last.text_range) == ((1,), (0,), (3, 3))


def test_d6_a_stop_string_inside_one_token() -> None:
    sent, last, _ = run(["x", "hello STOP world"], stop=["STOP"])
    assert (sent, last.text, last.text_range) == (["x"], "hello ", (0, 6))


def test_d7_only_a_real_prefix_is_held() -> None:
    sent, last, output = run(["Hi", "!", "\n", "Yes", "\n\n", "Hum", "ming"], stop=["\n\nHuman:"])
    assert sent == ["Hi", "!", "\nYes", "\n\nHumming"]
    assert (last.text, output.stopped) == ("", None)


def test_d7_held_text_is_flushed_at_the_end() -> None:
    sent, last, output = run(["Hi", "\n\nHum"], stop=["\n\nHuman:"])
    assert (sent, last.text, output.stopped) == (["Hi"], "\n\nHum", None)


def test_d7_a_prefix_that_restarts_is_not_lost() -> None:
    sent, last, output = run(list("aabaabaaab"), stop=["aabaaa"])
    assert ("".join(sent), last.text, output.stopped) == ("aab", "", "aabaaa")


def test_d10_stop_strings_match_however_they_are_tokenized() -> None:
    for pieces in (["def quick", "Sort"], [" quickSort"], list("quickSort("), ["quickS", "ort"]):
        assert run(pieces, stop=["quickSort"])[2].stopped == "quickSort"


def test_unicode_stop_strings_match_across_split_characters() -> None:
    data = "日本。終".encode()
    table = TokenBytes([data[at : at + 2] for at in range(0, len(data), 2)])
    output = OutputText(table, stop=["。"])
    text = ""
    for token in range(len(table)):
        chunk = output.push(token)
        text += chunk.text if chunk is not None else ""
        if output.stopped:
            break
    assert (text + output.finish().text, output.stopped) == ("日本", "。")


def test_the_match_that_is_complete_first_wins_and_then_the_longest() -> None:
    assert run(["abcd"], stop=["abcd", "bc"])[2].stopped == "bc"
    _, last, output = run(["xabc"], stop=["c", "bc", "abc"])
    assert (last.text, output.stopped) == ("x", "abc")
    assert run(["one END two STOP"], stop=["STOP", "END"])[2].stopped == "END"


@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a STOP")])
def test_include_stop_str_in_output(include: bool, text: str) -> None:
    sent, last, _ = run(["a ST", "OP b"], stop=["STOP"], include_stop_str_in_output=include)
    assert "".join(sent) + last.text == text


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "a"), (2, "a"), (3, "a\nb"), (4, "a\nb\nc"), (5, "a\nb\nc\nd")],
)
def test_s15_min_tokens_delays_stop_strings(min_tokens: int, text: str) -> None:
    sent, last, _ = run(["a", "\n", "b\nc", "\n", "d"], stop=["\n"], min_tokens=min_tokens)
    assert "".join(sent) + last.text == text


def test_s15_a_prefix_from_before_min_tokens_still_counts() -> None:
    sent, last, output = run(["x", "S", "TO", "P"], stop=["STOP"], min_tokens=4)
    assert ("".join(sent) + last.text, output.stopped) == ("x", "STOP")


def test_a_stop_string_of_a_special_tokens_spelling_needs_specials_to_be_shown() -> None:
    table = TokenBytes([b"Hi", b"<|end|>", b"x"], special_ids=[1])
    for skip, stopped in ((True, None), (False, "<|end|>")):
        output = OutputText(table, stop=["<|end|>"], skip_special_tokens=skip)
        for token in (0, 1):
            output.push(token)
        assert output.stopped == stopped


def test_for_params_takes_every_field() -> None:
    params = SamplingParams(
        stop=("b",), include_stop_str_in_output=True, min_tokens=2, skip_special_tokens=False
    )
    output = OutputText.for_params(TokenBytes([b"b", b"<s>", b"ab"], [1]), params)
    first = output.push(0)
    assert first is not None
    assert first.text == "b"
    assert output.push(1) is not None
    output.push(2)
    assert (output.stopped, output.finish().text) == ("b", "ab")


def test_bad_stop_strings_are_refused() -> None:
    for stop in ("", "\ud800"):
        with pytest.raises(InvalidRequestError, match="stop"):
            StopMatcher([stop])


def test_pushing_after_a_stop_is_an_error_of_the_caller() -> None:
    _, _, output = run(["a"], stop=["a"])
    with pytest.raises(RuntimeError, match="push after"):
        output.push(0)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_string_of_two_letters_is_found_after_each_of_its_beginnings(size: int) -> None:
    for letters in itertools.product("ab", repeat=size):
        needle = "".join(letters)
        for cut in range(size):
            text = needle[:cut] + needle
            found = StopMatcher([needle]).advance(text.encode())
            assert found == (needle, text.find(needle) + size), text


def test_v4_long_stop_strings_cost_nothing_until_they_match() -> None:
    """A request may bring 16 strings of 1,024 characters: their tables are built lazily."""
    pattern = _Pattern("a" * 1023 + "b")
    pattern.advance(b"xyz" * 100 + b"aaa", honour=True)
    assert len(pattern.failure) <= 3
    assert pattern.matched == 3


def test_v4_periodic_strings_cost_constant_work_per_byte() -> None:
    """The worst input of a naive search: count border steps instead of time."""
    steps = 0

    class Counting(_Pattern):
        def _border(self, length: int) -> int:
            nonlocal steps
            steps += 1
            return super()._border(length)

    pattern = Counting("a" * 1023 + "b")
    data = (b"a" * 1023 + b"c") * 20
    for at in range(0, len(data), 5):
        pattern.advance(data[at : at + 5], honour=True)
    assert 0 < steps <= len(data)
