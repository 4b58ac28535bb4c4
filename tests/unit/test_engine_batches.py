"""S19: what other engines' batches got wrong, on the fake executor; each result as if alone."""

from __future__ import annotations

import threading

from engine_support import WAIT, Recorder, alone, assert_baseline, make_engine, request
from together import arriving_together

from pocket_backend.api import SamplingParams
from pocket_backend.engine.llm import LLM
from pocket_backend.executors.fake import FakeOptions


def test_s19_two_batches_in_a_row_do_not_mix() -> None:
    engine, executor = make_engine(text=True)
    with engine, LLM(engine=engine) as llm:
        for names in (("a", "b", "c"), ("c", "a", "d", "e")):
            results = llm.generate(list(names), SamplingParams(max_tokens=9))
            expected = [alone(request("x", name.encode(), 9), text=True) for name in names]
            assert [r.text for r in results] == [e.results()[0].text for e in expected]
        assert_baseline(engine, executor)


def test_s19_concurrent_readers_get_their_own_tokens() -> None:
    engine, executor = make_engine()
    found: dict[int, tuple[int, ...]] = {}

    def read(index: int) -> None:
        events = list(engine.stream(request(f"r{index}", (index + 1, 7), 40)))
        found[index] = tuple(token for event in events for token in event.token_ids)

    with engine:
        readers = [threading.Thread(target=read, args=(index,)) for index in range(6)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(WAIT)
        assert_baseline(engine, executor)
    expected = [alone(request("x", (index + 1, 7), 40)).results()[0] for index in range(6)]
    assert [found[index] for index in range(6)] == [result.token_ids for result in expected]


def test_s19_twenty_prompts_in_sixteen_blocks() -> None:
    options = FakeOptions(num_blocks=16, block_size=4, max_slots=8, max_batch_tokens=16)
    engine, executor = make_engine(options, max_total_tokens=64)
    asked = [request(f"r{i}", tuple(range(i + 1, i + 8)), 20) for i in range(20)]
    sinks = [Recorder() for _ in asked]
    with engine:
        with arriving_together(engine, len(asked)):
            for one, sink in zip(asked, sinks, strict=True):
                engine.submit(one, sink)
        for one, sink in zip(asked, sinks, strict=True):
            assert sink.wait().finish_reason == "length"
            assert sink.token_ids == alone(one, options).results()[0].token_ids
        assert engine.stats().preemptions > 0
        assert_baseline(engine, executor)


def test_s19_stopping_during_generation_ends_every_reader() -> None:
    engine, executor = make_engine(FakeOptions(delay_seconds=0.01), max_batch_size=2)
    streams = [engine.stream(request(f"r{i}", (i + 1,), None)) for i in range(4)]
    next(streams[0])
    ends: list[str | None] = []
    readers = [
        threading.Thread(target=lambda s=stream: ends.append(list(s)[-1].finish_reason))
        for stream in streams
    ]
    for reader in readers:
        reader.start()
    engine.close()
    for reader in readers:
        reader.join(WAIT)
    assert ends == ["error"] * 4
    assert executor.closed
