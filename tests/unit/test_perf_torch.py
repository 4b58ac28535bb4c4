"""The judgement of ``perf.bench_torch``; its engines need torch and are not run here."""

from __future__ import annotations

from perf.bench_torch import BARS, METRIC, OURS, UNPACKED, contestants, packing_gain, ratios
from perf.records import Record


def speed(engine: str, value: float) -> Record:
    return Record.of("bench_torch", engine, "A8", 8, METRIC, "tokens/s", [value])


def test_ratios_are_ours_over_theirs() -> None:
    one_by_one, continuous = BARS
    records = [speed(OURS, 90.0), speed(one_by_one, 20.0), speed(continuous, 100.0)]
    assert ratios(records) == [(one_by_one, 4.5, 3.0), (continuous, 0.9, 1.0)]


def test_a_peer_that_did_not_run_is_not_judged() -> None:
    assert ratios([speed(OURS, 90.0)]) == []
    assert ratios([speed(name, 1.0) for name in BARS]) == []


def test_the_gain_of_packing_is_that_of_two_engines_which_differ_in_nothing_else() -> None:
    records = [speed(OURS, 90.0), speed(UNPACKED, 60.0), speed(next(iter(BARS)), 20.0)]
    assert packing_gain(records) == 1.5
    (ours, packed), (other, unpacked) = contestants("bfloat16", peers=False)
    assert (ours.name, other.name) == (OURS, UNPACKED)
    assert packed == {"backend": "torch", "backend_options": {"dtype": "bfloat16"}}
    assert unpacked["backend_options"] == {"dtype": "bfloat16", "pack_linear": False}
    assert [engine.name for engine, _ in contestants("float32", peers=True)[2:]] == list(BARS)
