"""How byte-level BPE vocabularies split text before merging, by the name in ``tokenizer.ggml.pre``.

A wrong split changes ids silently (numbers, CJK, combining marks), so an unknown name is an error,
never a default. Expressions are those of the models' own ``tokenizer.json``; several names share
one. Groups follow llama.cpp's table of pre-tokenizer names.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, *, letters: str = r"\p{L}", others: str = r"\p{L}\p{N}") -> str:
    """The GPT-4 family: contractions, words with one leading symbol, digit groups, symbols."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s{others}]+[\r\n]*{_END}"
    )


def _cased(digits: str, suffix: str) -> str:
    """The GPT-4o family: words also end where lower case turns into upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    word = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{word}{upper}*{lower}+{suffix}|{word}{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = _words(r"\p{N}", letters=r"[\p{L}\p{M}]", others=r"\p{L}\p{M}\p{N}")
_TEKKEN = _cased(r"\p{N}", "")
_GPT4O = _cased(r"\p{N}{1,3}", f"{_CONTRACTION}?")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_END}"
    ),
)


@dataclass(frozen=True, slots=True)
class SplitScheme:
    """``splits`` are applied in turn; ``gpt2_regex`` ends with the original GPT-2 expression."""

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_regex: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A whole piece that is in the vocabulary is taken as it is."""
    adds_bos: bool = False
    """Default where the file has no ``tokenizer.ggml.add_bos_token``."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_regex))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_GROUPS: tuple[tuple[SplitScheme, tuple[str, ...]], ...] = (
    (
        SplitScheme(gpt2_regex=True),
        ("gpt-2", "default", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling",
         "exaone4", "gigachat", "a.x-4.0", "mellum", "jina-es", "jina-de", "jina-v2-es",
         "jina-v2-de", "modern-bert"),
    ),
    (
        SplitScheme(single_digits=True, gpt2_regex=True),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
         "mellum2"),
    ),
    (
        SplitScheme((_LLAMA3,), ignore_merges=True, adds_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
         "jina-v5-nano"),
    ),
    (SplitScheme((_LLAMA3,)), ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")),
    (
        SplitScheme((_QWEN2,), nfc=True),
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    ),
    (SplitScheme((_QWEN2,)), ("stablelm2", "hunyuan", "solar-open", "grok-2")),
    (SplitScheme((_QWEN35,), nfc=True), ("qwen35",)),
    (SplitScheme((_TEKKEN,), ignore_merges=True, adds_bos=True), ("tekken",)),
    (SplitScheme((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    (SplitScheme(_DEEPSEEK_V3), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
)  # fmt: skip

SPLIT_SCHEMES = {name: scheme for scheme, names in _GROUPS for name in names}
