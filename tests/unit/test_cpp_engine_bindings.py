"""The native module's Python face: arguments, errors, threads, life cycle."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

native = pytest.importorskip("pocket_cpp_core", reason="the native module is not built")
pytest.importorskip("gguf", reason="tiny models are written with the gguf package")

from engine_driver import Driver, Part, packed  # noqa: E402
from tiny_gguf import TinyLlama, write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, TinyLlama(weight_format="Q8_0", tokenizer_tokens=300))
    return path


@pytest.fixture(scope="module")
def driver(model):
    return Driver(model, rows=4, context=128, threads=2)


def step_arguments(driver, *parts, **changes):
    arrays = packed(parts, driver.tables)
    rows = len(arrays["logits_rows"])
    arguments = arrays | {
        "temperature": np.zeros(rows, dtype=np.float32),
        "top_k": np.zeros(rows, dtype=np.int32),
        "top_p": np.ones(rows, dtype=np.float32),
        "min_p": np.zeros(rows, dtype=np.float32),
        "seed": np.zeros(rows, dtype=np.uint64),
        "token_index": np.zeros(rows, dtype=np.uint64),
    }
    return arguments | changes


def test_step_samples_what_logits_say(driver):
    parts = [Part([1, 2, 3], 0, 0), Part([4], 0, 1)]
    logits = driver.logits(*parts)
    tokens, logprobs = driver.engine.step(**step_arguments(driver, *parts), logprobs=True)
    assert tokens.dtype == np.int32
    assert logprobs.dtype == np.float32
    assert tokens.tolist() == logits.argmax(axis=1).tolist()
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    expected = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).max(axis=1)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_logprobs_are_nan_unless_asked_for(driver):
    _, logprobs = driver.engine.step(**step_arguments(driver, Part([1], 0, 0)))
    assert np.isnan(logprobs).all()


def test_sampled_rows_depend_on_their_own_seed_and_index_only(driver):
    def draw(seeds, indices):
        parts = [Part([7, 8, 9], 0, row) for row in range(len(seeds))]
        rows = len(seeds)
        arguments = step_arguments(
            driver,
            *parts,
            temperature=np.full(rows, 30.0, dtype=np.float32),
            seed=np.array(seeds, dtype=np.uint64),
            token_index=np.array(indices, dtype=np.uint64),
        )
        return driver.engine.step(**arguments)[0].tolist()

    alone = [draw([seed], [index])[0] for seed, index in ((42, 0), (7, 0), (42, 1), (2**64 - 1, 5))]
    together = draw([42, 7, 42, 2**64 - 1], [0, 0, 1, 5])
    assert together == alone
    assert draw([7, 42], [0, 0]) == [alone[1], alone[0]]
    assert len({draw([seed], [0])[0] for seed in range(30)}) > 10


def test_ids_beyond_the_tokenizer_are_never_sampled(driver):
    info = driver.engine.model_info
    assert (info["tokenizer_tokens"], info["vocab"]) == (300, 333)
    seeds = np.arange(4, dtype=np.uint64)
    for base in range(0, 200, 4):
        arguments = step_arguments(
            driver,
            *[Part([base % 300], 0, row) for row in range(4)],
            temperature=np.full(4, 50.0, dtype=np.float32),
            seed=seeds + np.uint64(base),
        )
        tokens, _ = driver.engine.step(**arguments, sample_vocab=300)
        assert (tokens < 300).all()


def test_logits_rows_may_be_any_rows_in_any_number(driver):
    part = Part(list(range(80)), 0, 0, range(80))
    every = driver.logits(part)
    assert every.shape == (80, 333)
    few = driver.logits(Part(list(range(80)), 0, 0, [79, 3, 3]))
    assert np.array_equal(few, every[[79, 3, 3]])
    none = driver.logits(Part(list(range(80)), 0, 0, []))
    assert none.shape == (0, 333)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("token_ids", [1, 2, 3], TypeError, "numpy array"),
        ("token_ids", np.array([1, 2, 3], dtype=np.int64), TypeError, "int32.*int64"),
        ("positions", np.array([0, 1, 2], dtype=">i4"), TypeError, "positions"),
        ("positions", np.zeros((3, 1), dtype=np.int32), ValueError, "1 dimension"),
        ("token_ids", np.zeros(6, dtype=np.int32)[::2], ValueError, "contiguous"),
        ("block_tables", np.zeros(8, dtype=np.int32), ValueError, "2 dimension"),
        ("block_tables", np.zeros((4, 8), dtype=np.int32).T, ValueError, "contiguous"),
        ("temperature", np.zeros(1), TypeError, "float32.*float64"),
        ("temperature", np.zeros(2, dtype=np.float32), ValueError, "temperature: has 2"),
        ("seed", np.zeros(1, dtype=np.int64), TypeError, "seed"),
        ("token_index", None, TypeError, "token_index.*NoneType"),
        ("top_p", np.array([0.0], dtype=np.float32), ValueError, r"sampling\[0\].top_p"),
        ("temperature", np.array([np.nan], dtype=np.float32), ValueError, "temperature: got nan"),
    ],
)
def test_wrong_arrays_are_named(driver, name, value, error, message):
    arguments = step_arguments(driver, Part([1, 2, 3], 0, 0)) | {name: value}
    with pytest.raises(error, match=f"{name}|sampling") as caught:
        driver.engine.step(**arguments)
    assert caught.match(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 333, 3]}, r"token_ids\[1\]: got 333; must be from 0 to 332"),
        ({"token_ids": [-1, 2, 3]}, r"token_ids\[0\]: got -1"),
        ({"token_ids": [1, 2]}, "positions: has 3 entries for 2 tokens"),
        ({"token_ids": [], "positions": []}, "token_ids: the step has 0"),
        ({"positions": [0, 2, 3]}, r"positions\[1\]: got 2; .*consecutive"),
        ({"positions": [126, 127, 128]}, r"positions\[2\]: got 128; must be from 0 to 127"),
        ({"positions": [-1, 0, 1]}, r"positions\[0\]: got -1"),
        ({"sequence_offsets": [0, 2]}, "must run from 0 to the number of tokens"),
        ({"sequence_offsets": [1, 3]}, "sequence_offsets"),
        ({"sequence_offsets": [0]}, "sequence_offsets: has 1"),
        ({"sequence_offsets": [0, 3, 3], "table_rows": [0, 1]}, r"sequence_offsets\[2\]: got 3"),
        ({"sequence_offsets": [0, 5, 3], "table_rows": [0, 1]}, r"sequence_offsets\[1\]: got 5"),
        ({"table_rows": [4]}, r"table_rows\[0\]: got 4; must be from 0 to 3"),
        ({"table_rows": [-1]}, r"table_rows\[0\]: got -1"),
        ({"logits_rows": [3]}, r"logits_rows\[0\]: got 3"),
        (
            {"sequence_offsets": [0, 1, 3], "positions": [0, 0, 1], "table_rows": [2, 2]},
            "sequences 0 and 1 both write block",
        ),
    ],
)
def test_malformed_steps_name_field_value_and_limit(driver, changes, message):
    arguments = step_arguments(driver, Part([1, 2, 3], 0, 0))
    arguments |= {key: np.array(value, dtype=np.int32) for key, value in changes.items()}
    with pytest.raises(native.InvalidArgument, match=message):
        driver.engine.step(**arguments)


def test_malformed_block_tables(driver):
    arguments = step_arguments(driver, Part([1] * 20, 0, 0))
    for bad in (-1, 32, 2**31 - 1):
        tables = driver.tables.copy()
        tables[0, 1] = bad
        with pytest.raises(ValueError, match=rf"block_tables\[0\]\[1\]: got {bad}"):
            driver.engine.step(**arguments | {"block_tables": tables})
    with pytest.raises(ValueError, match="needs 2 blocks; rows have 1"):
        driver.engine.step(**arguments | {"block_tables": driver.tables[:, :1].copy()})
    # Entries beyond the last position do not matter.
    tables = np.full_like(driver.tables, -1)
    tables[0, :2] = [5, 6]
    driver.engine.step(**arguments | {"block_tables": tables})


def test_a_block_written_by_one_and_read_by_another_is_refused(driver):
    tables = driver.tables.copy()
    tables[1, 0] = tables[0, 0]
    parts = [Part([1, 2], 0, 0), Part([3], 16, 1)]
    with pytest.raises(ValueError, match="sequence 1 reads block"):
        driver.engine.step(**step_arguments(driver, *parts) | {"block_tables": tables})


def test_limits_of_a_step(model):
    driver = Driver(model, rows=2, context=128, max_batch_tokens=8)
    with pytest.raises(ValueError, match=r"token_ids: the step has 9.*max_batch_tokens \(8\)"):
        driver.logits(Part([1] * 9, 0, 0))
    assert driver.logits(Part([1] * 8, 0, 0)).shape == (1, 333)
    single = Driver(model, rows=2, context=128, max_sequences=1)
    with pytest.raises(ValueError, match=r"max_sequences \(1\)"):
        single.logits(Part([1], 0, 0), Part([1], 0, 1))


def test_a_refused_step_has_written_nothing(driver):
    before = driver.logits(Part([11, 12, 13], 0, 0))
    arguments = step_arguments(driver, Part([50, 51, 333], 0, 0))
    with pytest.raises(ValueError, match="token_ids"):
        driver.engine.step(**arguments)
    after = driver.logits(Part([13], 2, 0))
    assert np.array_equal(before, after)


def test_top_logprobs_per_row(driver):
    parts = [Part([1, 2], 0, row) for row in range(3)]
    wanted = np.array([-1, 0, 3], dtype=np.int32)
    tokens, logprobs, ids, values = driver.engine.step(
        **step_arguments(driver, *parts), top_logprobs=wanted
    )
    assert (ids.shape, ids.dtype) == ((3, 20), np.int32)
    assert (values.shape, values.dtype) == ((3, 20), np.float32)
    assert np.isnan(logprobs[0])
    assert logprobs[1] == logprobs[2] == values[2, 0]
    assert ids[2, 0] == tokens[2]
    assert (ids[2, :3] >= 0).all()
    assert (ids[:2] == -1).all()
    assert (ids[2, 3:] == -1).all()
    assert np.isnan(values[2, 3:]).all()


def test_edits_and_masks_of_rows(driver):
    parts = [Part([1, 2], 0, row) for row in range(3)]
    plain = driver.engine.step(**step_arguments(driver, *parts))[0]
    ban = native.LogitEdits(333, banned=np.array([plain[0]], dtype=np.int32))
    word = np.zeros(11, dtype=np.int32)
    word[1] = 1 << 5
    tokens, _ = driver.engine.step(
        **step_arguments(driver, *parts), edits=[None, ban, None], allowed=[None, None, word]
    )
    assert tokens[0] == plain[0]
    assert tokens[1] != plain[0]
    assert tokens[2] == 37
    word[1] = 0
    tokens, _ = driver.engine.step(**step_arguments(driver, *parts), allowed=[None, None, word])
    assert tokens.tolist() == [plain[0], plain[0], -2]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"edits": [None, None]}, ValueError, "edits: has 2 entries; logits_rows has 1"),
        ({"edits": (None,)}, TypeError, "edits: must be a list"),
        ({"edits": [3]}, TypeError, r"edits\[0\]: must be LogitEdits"),
        ({"edits": [native.LogitEdits(300)]}, ValueError, r"made for 300 ids; the model has 333"),
        ({"allowed": []}, ValueError, "allowed: has 0 entries"),
        ({"allowed": [np.zeros(10, dtype=np.int32)]}, ValueError, r"10 words; 333 ids need 11"),
        ({"allowed": [np.zeros(0, dtype=np.int32)]}, ValueError, "no words"),
        ({"allowed": [np.zeros(11, dtype=np.int64)]}, TypeError, "allowed.*int32"),
        ({"top_logprobs": np.array([21], dtype=np.int32)}, ValueError, "top_logprobs: got 21"),
        ({"top_logprobs": [1]}, TypeError, "top_logprobs"),
    ],
)
def test_wrong_row_options_are_named(driver, changes, error, message):
    with pytest.raises(error, match=message):
        driver.engine.step(**step_arguments(driver, Part([1], 0, 0)) | changes)


def test_logit_edits_check_their_arguments():
    ids = np.array([1, 2], dtype=np.int32)
    with pytest.raises(ValueError, match="bias_values: has 0 entries; bias_tokens has 2"):
        native.LogitEdits(10, bias_tokens=ids)
    with pytest.raises(native.InvalidArgument, match="banned: got token 2; must be from 0 to 1"):
        native.LogitEdits(2, banned=ids)
    with pytest.raises(native.InvalidArgument, match="repetition_penalty"):
        native.LogitEdits(10, repetition_penalty=-1.0)
    with pytest.raises(TypeError, match="ending"):
        native.LogitEdits(10, ending=[1])
    edits = native.LogitEdits(10, frequency_penalty=1.0)
    edits.reset_history(ids, num_prompt=1)
    edits.append(3)
    assert edits.length == 3
    with pytest.raises(native.InvalidArgument, match="token: got token 10"):
        edits.append(10)
    with pytest.raises(native.InvalidArgument, match="num_prompt"):
        edits.reset_history(ids, num_prompt=3)
    assert edits.length == 3


def test_edits_in_use_refuse_to_change(model):
    """A step has let the GIL go and reads them: a change then would be a data race."""
    driver = Driver(model, context=128, threads=1, isa="scalar")
    edits = native.LogitEdits(333, repetition_penalty=1.2)
    arguments = step_arguments(driver, Part(list(range(120)), 0, 0))
    stop = threading.Event()

    def work():
        while not stop.is_set():
            driver.engine.step(**arguments, edits=[edits])

    thread = threading.Thread(target=work)
    thread.start()

    def keep_changing():
        for _ in range(20000):
            edits.append(1)
            time.sleep(0.001)

    try:
        with pytest.raises(native.InvalidArgument, match="a step in progress"):
            keep_changing()
    finally:
        stop.set()
        thread.join()
    edits.append(1)


def test_copy_blocks_checks_ids(driver):
    block = np.array([0], dtype=np.int32)
    with pytest.raises(native.InvalidArgument, match=r"to\[0\]: got 32"):
        driver.engine.copy_blocks(block, np.array([32], dtype=np.int32))
    with pytest.raises(TypeError, match="from_blocks"):
        driver.engine.copy_blocks([0], block)


def test_exception_classes():
    for name, code in {
        "InvalidArgument": "invalid_argument",
        "ModelFileError": "bad_file",
        "Unsupported": "unsupported",
        "ResourceExhausted": "resource_exhausted",
        "InternalError": "internal",
    }.items():
        error = getattr(native, name)
        assert issubclass(error, native.EngineError)
        assert error.code == code
    assert issubclass(native.InvalidArgument, ValueError)
    assert issubclass(native.ResourceExhausted, MemoryError)
    assert not issubclass(native.ModelFileError, ValueError)


def test_build_info_and_inspection(model):
    info = native.build_info()
    assert info["isa"] in info["isas"]
    assert "llama" in info["architectures"]
    inspected = native.inspect_model(model, kv_dtype="f32")
    loaded = Driver(model, context=128, kv_dtype="f32").engine
    assert inspected["weight_bytes"] == 0
    assert inspected | {"weight_bytes": loaded.model_info["weight_bytes"]} == loaded.model_info
    assert loaded.kv_cache_bytes == 8 * inspected["kv_bytes_per_block"]
    assert loaded.workspace_bytes > 0


def test_closed_engines_raise(model):
    driver = Driver(model, context=128)
    driver.engine.close()
    driver.engine.close()
    with pytest.raises(native.EngineError, match="closed"):
        driver.logits(Part([1], 0, 0))
    with pytest.raises(native.EngineError, match="closed"):
        _ = driver.engine.model_info


def test_the_gil_is_released_and_threads_take_turns(model):
    """Another Python thread runs while a step computes; steps from two threads do not mix."""
    driver = Driver(model, rows=2, context=128, threads=1, isa="scalar")
    tokens = list(range(120))
    expected = driver.logits(Part(tokens, 0, 0))
    results: list[np.ndarray] = []

    inside = [False, False]
    seen = threading.Event()
    deadline = time.monotonic() + 60

    def work(row):
        while len(results) < 10 or not (seen.is_set() or time.monotonic() > deadline):
            inside[row] = True
            results.append(driver.logits(Part(tokens, 0, row)))
            inside[row] = False

    threads = [threading.Thread(target=work, args=(row,)) for row in range(2)]
    for thread in threads:
        thread.start()
    ticks = 0  # this thread's turns within one step of the other
    while not seen.is_set() and any(thread.is_alive() for thread in threads):
        done = len(results)
        time.sleep(0)
        ticks = ticks + 1 if any(inside) and len(results) == done else 0
        if ticks > 20:
            seen.set()
    for thread in threads:
        thread.join()
    assert seen.is_set(), "no other thread had its turn while a step computed"
    assert all(np.array_equal(result, expected) for result in results)
