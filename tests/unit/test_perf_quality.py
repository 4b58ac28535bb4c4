"""perf.quality: scores against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from perf.quality import Scores, against, sign_test, windows


def test_uniform_logits_have_the_vocabulary_as_perplexity():
    scores = Scores.of(np.zeros((5, 32)), [0, 3, 31, 7, 7])
    assert scores.perplexity == pytest.approx(32)


def test_certain_logits_have_perplexity_one_and_choose_the_target():
    logits = np.full((2, 4), -1e3)
    logits[0, 2] = logits[1, 1] = 1e3
    scores = Scores.of(logits, [2, 1])
    assert scores.perplexity == pytest.approx(1)
    assert scores.choices.tolist() == [2, 1]


def test_agreement_counts_equal_choices():
    first = Scores.of(np.eye(4), [0, 1, 2, 3])
    second = Scores.of(np.eye(4)[[0, 1, 3, 2]], [0, 1, 2, 3])
    assert first.agreement(second) == 0.5
    assert Scores.joined([first, first]).agreement(Scores.joined([first, second])) == 0.75


def test_the_sign_test_is_the_exact_binomial_one():
    assert sign_test(0, 0) == 1
    assert sign_test(3, 3) == 1
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 4) == pytest.approx(2 * (5 + 1) / 32)
    assert sign_test(700, 500) < 1e-7


def test_two_engines_are_compared_where_only_one_is_right():
    exact = Scores.of(np.eye(4), [0, 1, 2, 3])
    ours = Scores.of(np.eye(4)[[0, 1, 3, 2]], [0, 1, 2, 3])
    peer = Scores.of(np.eye(4)[[1, 2, 2, 0]], [0, 1, 2, 3])
    assert against(ours, peer, exact).startswith("2 : 1 (p = 1")


def test_windows_are_whole_and_consecutive():
    assert windows(range(10), 3, 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows(range(10), 3, 0) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ValueError, match="10 tokens; 4 x 3"):
        windows(range(10), 3, 4)
