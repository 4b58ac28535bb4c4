"""The tokenizer and detokenizer models over doubles of Triton's objects and the fake tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from triton_doubles import Request, TritonModelException, ints, make_pb_utils, model_args, strings

from pocket_backend.api import ConfigurationError, EngineArgs
from pocket_backend.triton.detokenizer import DetokenizerModel
from pocket_backend.triton.feedback import REPORT_EVERY, FeedbackListener
from pocket_backend.triton.responses import error_text, response_of_text
from pocket_backend.triton.settings import GeneratorSettings, engine_args, environment_of
from pocket_backend.triton.startup import load_or_explain
from pocket_backend.triton.tokenizer import TokenizerModel

PB = make_pb_utils()
CHAT = json.dumps([{"role": "user", "content": "hi"}])


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerModel:
    return TokenizerModel(PB, model_args(model="fake"))


@pytest.fixture
def detokenizer() -> Iterator[DetokenizerModel]:
    model = DetokenizerModel(PB, model_args(model="fake"))
    yield model
    model._feedback.close()


def chunk(
    context: tuple[int, ...], tokens: tuple[int, ...], begin: int, end: int, **more: np.ndarray
) -> dict[str, np.ndarray]:
    return {
        "context_ids": ints(*context), "token_ids": ints(*tokens),
        "text_range": ints(begin, end), **more,
    }  # fmt: skip


def test_tokenizer_answers_each_request_of_a_batch_by_itself(tokenizer: TokenizerModel) -> None:
    good, bad, chat = tokenizer.execute(
        [
            Request({"text_input": strings("caf\u00e9")}, parameters={"max_tokens": 5}),
            Request({"text_input": strings(b"\xff")}),
            Request({"messages": strings(CHAT), "stream": np.array([True])}),
        ]
    )
    assert good.ids("input_ids") == tuple("caf\u00e9".encode())
    assert json.loads(good.text("sampling_parameters")) == {"max_tokens": 5, "stream": False}
    assert bad.error.message().startswith("text_input: not UTF-8 text")
    assert bad.error.code() == 3
    assert bytes(chat.ids("input_ids")) == b"user: hi\nassistant: "
    assert chat.tensors["errors_as_output"] == [True]


def test_tokenizer_hides_internal_errors(
    tokenizer: TokenizerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[int]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(tokenizer._tokenizer, "encode", broken, raising=False)
    (answer,) = tokenizer.execute([Request({"text_input": strings("x")})])
    assert answer.error.message() == "internal error: RuntimeError"


def test_detokenizer_decodes_the_range(detokenizer: DetokenizerModel) -> None:
    euro = tuple("\u20ac".encode())
    whole, part, special = detokenizer.execute(
        [
            Request(chunk(euro[:2], (euro[2], 65), 0, 4)),
            Request(chunk((65, 66), (67, 68), 1, 3)),
            Request(chunk((), (0, 65), 0, 6, skip_special_tokens=np.array([False]))),
        ]
    )
    assert [r.text("text_output") for r in (whole, part, special)] == ["\u20acA", "BC", "<eos>A"]


def test_detokenizer_decodes_several_texts_of_one_response(detokenizer: DetokenizerModel) -> None:
    inputs = {**chunk((), (65, 66, 67, 68), 0, 0), "text_range": ints(0, 2, 3, 3, 3, 4)}
    (answer,) = detokenizer.execute([Request(inputs)])
    assert answer.tensors["text_output"].tolist() == [b"AB", b"", b"D"]


@pytest.mark.parametrize("bounds", [(2, 1), (-1, 1), (1,), (), (0, 1, 2), (0, 1, 1, 0)])
def test_detokenizer_refuses_bad_ranges(
    detokenizer: DetokenizerModel, bounds: tuple[int, ...]
) -> None:
    inputs = {**chunk((), (65,), 0, 1), "text_range": ints(*bounds)}
    (answer,) = detokenizer.execute([Request(inputs)])
    assert answer.error.message().startswith("text_range")


def test_detokenizer_raises_the_error_that_travelled(detokenizer: DetokenizerModel) -> None:
    text = error_text(ConfigurationError("no good"))
    assert text == "INTERNAL: no good"
    raised, fine, forged = detokenizer.execute(
        [
            Request(chunk((), (), 0, 0, error=strings("CANCELLED: too late"))),
            Request(chunk((), (65,), 0, 1, error=strings(""))),
            Request(chunk((), (), 0, 0, error=strings("__class__: " + "x" * 10_000))),
        ]
    )
    assert (raised.error.message(), raised.error.code()) == ("too late", 7)
    assert fine.text("text_output") == "A"
    assert forged.error.code() == PB.TritonError.UNKNOWN
    assert len(forged.error.message()) < 3000
    assert response_of_text(PB, "no code").error.message() == ""


def test_detokenizer_reports_abandoned_streams_only(detokenizer: DetokenizerModel) -> None:
    seen: list[str] = []
    listener = FeedbackListener(seen.append)
    keys = [listener.new_key() for _ in range(3)]
    detokenizer.execute(
        [
            Request(chunk((), (65,), 0, 1, stream_key=strings(keys[0])), cancelled=False),
            Request(chunk((), (65,), 0, 1, stream_key=strings(keys[1])), cancelled=True),
            Request(chunk((), (65,), 0, 1, stream_key=strings("nonsense")), cancelled=True),
            Request(chunk((), (65,), 0, 1), cancelled=True),
        ]
    )
    listener.close()
    assert seen == [keys[1]]


def test_progress_is_reported_per_generator(detokenizer: DetokenizerModel) -> None:
    first, second = FeedbackListener(len), FeedbackListener(len)
    for listener, chunks in ((first, 3 * REPORT_EVERY + 5), (second, REPORT_EVERY)):
        key = strings(listener.new_key())
        detokenizer.execute([Request(chunk((), (65,), 0, 1, stream_key=key))] * chunks)
    first.close()
    second.close()
    assert (first.done, second.done) == (3 * REPORT_EVERY, REPORT_EVERY)


# --- settings -------------------------------------------------------------------------------------


def test_environment_wins_over_config_and_empty_counts_as_unset() -> None:
    config = model_args(model="a.gguf", max_batch_size="4", threads="")["model_config"]
    merged = environment_of(config, {"POCKETLLM_MAX_BATCH_SIZE": "8", "POCKETLLM_MODEL": ""})
    assert engine_args(merged) == EngineArgs("a.gguf", max_batch_size=8)


def test_bad_settings_are_one_sentence() -> None:
    config = model_args(model="a.gguf", drain_seconds="soon")["model_config"]
    with pytest.raises(ConfigurationError, match="POCKETLLM_DRAIN_SECONDS: got 'soon'"):
        GeneratorSettings.from_model_config(config, {})
    with pytest.raises(ConfigurationError, match="POCKETLLM_MAX_BATCH_SIZE: got 'x'"):
        engine_args({"POCKETLLM_MODEL": "m", "POCKETLLM_MAX_BATCH_SIZE": "x"})


def test_a_model_that_does_not_load_says_why(tmp_path: object) -> None:
    with pytest.raises(TritonModelException, match=r"nowhere\.gguf"):
        load_or_explain(TokenizerModel, PB, model_args(model="/nowhere.gguf"))
