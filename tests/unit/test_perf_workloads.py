"""The prompts are of the stated sizes, distinct, and the same on every run."""

from __future__ import annotations

import itertools
import random

import pytest

from perf import workloads
from perf.workloads import (
    RANDOM_TOKENS,
    Batch,
    Corpus,
    Workload,
    decode_workload,
    figure_of,
    prefill_workload,
    select_workloads,
    shared_prefix_workload,
)

_CORPUS = Corpus(tuple(range(1000, 4000)))


def _one(workload: Workload, seed: int = 0, round_index: int = 0) -> Batch:
    (batch,) = workload.batches(_CORPUS, seed, round_index)
    return batch


@pytest.mark.parametrize("concurrency", [1, 2, 4, 8, 16])
def test_decode_sizes(concurrency: int) -> None:
    batch = _one(decode_workload(concurrency))
    assert len(set(batch.prompts)) == concurrency
    assert {len(prompt) for prompt in batch.prompts} == {64}
    assert batch.max_new_tokens == 128


@pytest.mark.parametrize("length", [1024, 4096])
def test_prefill_sizes(length: int) -> None:
    batch = _one(prefill_workload(length))
    assert [len(prompt) for prompt in batch.prompts] == [length]
    assert batch.max_new_tokens == 1


def test_shared_prefix_sizes() -> None:
    cold, warm = shared_prefix_workload().batches(_CORPUS, 0, 0)
    prefixes = {prompt[:1024] for prompt in cold.prompts + warm.prompts}
    assert len(prefixes) == 1
    suffixes = {prompt[1024:] for prompt in cold.prompts + warm.prompts}
    assert len(suffixes) == 32
    assert {len(suffix) for suffix in suffixes} == {32}
    assert cold.max_new_tokens == warm.max_new_tokens == 32
    # What they share ends with the prefix: no pair of suffixes starts alike.
    assert len({suffix[0] for suffix in suffixes}) > 1


def test_equal_arguments_give_equal_prompts() -> None:
    for workload in select_workloads():
        assert workload.batches(_CORPUS, 7, 3) == workload.batches(_CORPUS, 7, 3)


def test_seed_round_and_workload_change_the_prompts() -> None:
    batch = _one(decode_workload(4))
    assert not set(batch.prompts) & set(_one(decode_workload(4), seed=1).prompts)
    assert not set(batch.prompts) & set(_one(decode_workload(4), round_index=1).prompts)
    assert not set(batch.prompts) & set(_one(decode_workload(8)).prompts)


def test_windows_are_text_behind_random_tokens_and_wrap_around() -> None:
    small = Corpus((1, 2, 3, 4, 5))
    window = small.window(random.Random(0), 20)
    text = window[RANDOM_TOKENS:]
    assert all(b == a % 5 + 1 for a, b in itertools.pairwise(text))
    assert set(window) <= set(small.tokens)


def test_corpus_falls_back_to_our_own_licence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(workloads, "_DEBIAN_LICENCES", workloads.Path(str(tmp_path)) / "absent")
    assert "Apache License" in workloads.licence_text()


def test_corpus_keeps_all_text() -> None:
    corpus = Corpus.of(lambda text: list(text.encode()))
    assert bytes(corpus.tokens).decode() == workloads.licence_text()


def test_selection() -> None:
    names = [point.workload for w in select_workloads() for point in w.points]
    assert names == [
        *("A1", "A2", "A4", "A8", "A16", "B1024", "B4096"),
        *("C cold", "C warm"),
    ]
    assert [w.name for w in select_workloads("b, a", quick=True)] == ["A1", "A8", "B1024"]
    for wrong in ("", "A,D"):
        with pytest.raises(ValueError, match="comma list"):
            select_workloads(wrong)


def test_figures_count_what_they_say() -> None:
    decode, prefill, shared = decode_workload(2), prefill_workload(1024), shared_prefix_workload()
    assert figure_of(decode.points[0], _one(decode), 2.0, 256) == 128.0
    assert figure_of(prefill.points[0], _one(prefill), 0.5, 1) == 2048.0
    cold = shared.batches(_CORPUS, 0, 0)[0]
    assert figure_of(shared.points[0], cold, 1.5, 512) == 1.5
