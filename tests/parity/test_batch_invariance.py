"""A token's logits have the same bits whatever shares its step and however its prefix came in.

Every comparison here is of bits. The reference is a sequence alone, prefilled at once, on one
thread, with the scalar kernels; the sequences, their neighbours and the models are deterministic.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_driver import Driver, Part
from tiny_gguf import TinyLlama, write_gguf

import pocket_cpp_core

pytestmark = pytest.mark.parity

ISAS = pocket_cpp_core.build_info()["isas"]
LENGTHS = (1, 3, 16, 17, 40, 64, 100, 150)
CONTEXT = 192
VOCAB = 333


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Models of the mixed formats that matter: nibbles, bytes, floats; odd group widths."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        "q4_1": TinyLlama(weight_format="Q4_1", heads=6, kv_heads=2, head_dim=32, hidden=128),
        "q8_0": TinyLlama(weight_format="Q8_0", heads=4, kv_heads=4, tied=False),
        "q4_0": TinyLlama(weight_format="Q4_0", heads=4, kv_heads=1),
        "bf16": TinyLlama(weight_format="BF16"),
    }
    paths = {}
    for name, model in models.items():
        assert model.vocab == VOCAB
        paths[name] = folder / f"{name}.gguf"
        write_gguf(paths[name], model)
    return paths


def sequence(index: int, length: int | None = None) -> list[int]:
    random = np.random.default_rng(100 + index)
    return random.integers(0, VOCAB, length or LENGTHS[index % len(LENGTHS)]).tolist()


def alone(path, tokens, **options):
    """Logits of the last token: one sequence, one step, one thread, scalar kernels."""
    settings = {"threads": 1, "isa": "scalar"} | options
    return Driver(path, context=CONTEXT, **settings).logits(Part(tokens, 0, 0))[0]


def same_bits(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


MODELS = ("q4_1", "q8_0", "q4_0", "bf16")
PRECISIONS = ("int8", "f32")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_isa_and_thread_count(tiny, name, precision):
    tokens = sequence(7)
    expected = alone(tiny[name], tokens, precision=precision)
    assert np.isfinite(expected).all()
    for isa in ISAS:
        for threads in (1, 2, 3):
            got = alone(tiny[name], tokens, precision=precision, isa=isa, threads=threads)
            assert same_bits(got, expected), (isa, threads)


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_chunk_sizes(tiny, name, precision, kv_dtype):
    tokens = sequence(7)
    options = {"precision": precision, "kv_dtype": kv_dtype}
    expected = Driver(tiny[name], context=CONTEXT, threads=1, isa="scalar", **options).all_logits(
        tokens
    )
    for isa in ISAS:
        driver = Driver(tiny[name], context=CONTEXT, isa=isa, **options)
        for chunk in (1, 3, 16, 17, 64, None):
            assert same_bits(driver.all_logits(tokens, chunk=chunk), expected), (isa, chunk)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_batch_sizes_mixed_prefill_and_decode(tiny, name, precision):
    """Batches of 1 to 32: even rows prefill in this step, odd rows decode their last token."""
    sequences = [sequence(i) for i in range(32)]
    expected = [alone(tiny[name], tokens, precision=precision) for tokens in sequences]
    for isa in ISAS:
        driver = Driver(
            tiny[name],
            rows=32,
            context=CONTEXT,
            isa=isa,
            precision=precision,
            max_batch_tokens=2048,
        )
        for size in (1, 2, 8, 9, 32):
            parts = []
            for row, tokens in enumerate(sequences[:size]):
                decodes = row % 2 == 1 and len(tokens) > 1
                if decodes:
                    driver.logits(Part(tokens[:-1], 0, row))
                start = len(tokens) - 1 if decodes else 0
                parts.append(Part(tokens[start:], start, row))
            for order in (parts, parts[::-1]):
                got = driver.logits(*order)
                for part, logits in zip(order, got, strict=True):
                    assert same_bits(logits, expected[part.row]), (isa, size, part.row)


@pytest.mark.parametrize("name", MODELS)
def test_block_ids_and_unused_blocks_contents(tiny, name):
    """Scattered blocks that other sequences wrote before give the bits of a fresh pool."""
    tokens = sequence(6)
    expected = alone(tiny[name], tokens)
    for shuffle in (1, 2):
        driver = Driver(tiny[name], rows=4, context=CONTEXT, shuffle=shuffle)
        for row in range(4):
            driver.logits(Part(sequence(7, 190), 0, row))
        for row in range(4):
            assert same_bits(driver.logits(Part(tokens, 0, row))[0], expected)


@pytest.mark.parametrize("name", MODELS)
def test_shared_prefix_blocks_and_copies(tiny, name):
    """A prefix computed by another sequence (cache hit), and a fork that copied its last block."""
    tokens = sequence(6)  # 100 tokens: 6 full blocks and 4 positions of a seventh
    expected = alone(tiny[name], tokens)
    driver = Driver(tiny[name], rows=3, context=CONTEXT)
    driver.logits(Part(tokens, 0, 0))
    driver.tables[1, :6] = driver.tables[0, :6]
    assert same_bits(driver.logits(Part(tokens[96:], 96, 1))[0], expected)
    driver.tables[2, :6] = driver.tables[0, :6]
    source, target = driver.tables[0, 6:7].copy(), driver.tables[2, 6:7].copy()
    driver.engine.copy_blocks(source, target)
    assert same_bits(driver.logits(Part(tokens[99:], 99, 2))[0], expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_poisoned_neighbour_and_its_recycled_blocks(tiny, tmp_path, precision):
    """NaN in one sequence's activations stays there, also when its KV blocks are used again."""
    model = TinyLlama(weight_format="F32")
    path = tmp_path / "nan.gguf"
    poison = 5

    def poisoned(weights):
        weights["token_embd.weight"][poison] = np.nan
        # Tied to the embedding, every row's logit `poison` would be NaN.
        return weights | {"output.weight": np.nan_to_num(weights["token_embd.weight"])}

    write_gguf(path, model, change_tensors=poisoned)
    tokens = [t for t in sequence(6) if t != poison]
    expected = alone(path, tokens, precision=precision)
    driver = Driver(path, rows=2, context=CONTEXT, precision=precision)
    bad, good = driver.logits(Part([poison, *tokens[:60]], 0, 0), Part(tokens, 0, 1))
    assert np.isnan(bad).any()
    assert same_bits(good, expected)
    for isa in ISAS:
        driver = Driver(path, rows=1, context=CONTEXT, precision=precision, isa=isa)
        assert np.isnan(driver.logits(Part([poison] * 190, 0, 0))).any()
        assert same_bits(driver.logits(Part(tokens, 0, 0))[0], expected), isa


def test_the_real_model(smollm2, english):
    """Both kernel families at real sizes; the scalar oracle, which is slow, sees a short prompt."""
    tokens = english[:150]
    fast = [isa for isa in ISAS if isa != "scalar"] or ISAS
    expected = Driver(smollm2.path, threads=1, isa=fast[-1]).all_logits(tokens)
    for isa in fast:
        driver = Driver(smollm2.path, rows=3, isa=isa, threads=2, shuffle=3)
        for chunk in (17, 64):
            assert same_bits(driver.all_logits(tokens, chunk=chunk), expected), (isa, chunk)
        driver.logits(Part(tokens[:99], 0, 0))
        got = driver.logits(
            Part(tokens[99:100], 99, 0), Part(english[60:120], 0, 1), Part(tokens[:41], 0, 2)
        )
        assert same_bits(got[0], expected[99])
        assert same_bits(got[2], expected[40])
    if len(ISAS) > 1:
        scalar = Driver(smollm2.path, isa="scalar").all_logits(tokens[:6])
        assert same_bits(scalar, expected[:6])
