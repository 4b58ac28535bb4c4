"""Traffic and verdict of the Locust tests; these parts need no Locust."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from perf.locust.traffic import Lengths, Session
from perf.locust.verdict import Figures, Objectives, misses

GOOD = Figures(requests=100, failures=0, ttft_p95_seconds=0.5, inter_token_p99_seconds=0.05)


def test_lengths_have_the_medians_they_name() -> None:
    lengths = Lengths()
    draw = random.Random(1)
    prompts, outputs = zip(*(lengths.draw(draw) for _ in range(4000)), strict=True)
    assert statistics.median(prompts) == pytest.approx(lengths.prompt_median, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(lengths.output_median, rel=0.1)
    assert min(prompts) >= 1
    assert max(prompts) == lengths.prompt_max, "the tail is cut, not lost"
    assert max(outputs) <= lengths.output_max


def test_a_session_grows_from_a_shared_prefix() -> None:
    session = Session(random.Random(2), turns=3)
    turns = []
    for messages in session.questions():
        turns.append(messages)
        session.answered(f"answer {len(turns)}")
    assert [len(messages) for messages in turns] == [2, 4, 6]
    for earlier, later in pairwise(turns):
        assert later[: len(earlier)] == earlier
    other = next(Session(random.Random(3), turns=1).questions())
    assert other[0] == turns[0][0]
    assert other[1] != turns[0][1]


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        (GOOD, []),
        (Figures(0, 0, None, None), ["no request was made"]),
        (Figures(100, 2, 0.5, 0.05), ["2.00% of requests failed; at most 1.00% may"]),
        (
            Figures(100, 1, 3.0, 0.05),
            ["95 % of first tokens came within 3.000 s; the objective is 2.5 s"],
        ),
        (Figures(100, 0, 0.5, None), ["99 % of further tokens: nothing was measured"]),
    ],
)
def test_verdict(figures: Figures, missed: list[str]) -> None:
    assert misses(figures, Objectives()) == missed
