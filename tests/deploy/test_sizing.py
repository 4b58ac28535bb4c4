"""Sizes in docs/deploy.md and in the value sets follow from the same formulas."""

from __future__ import annotations

import dataclasses
import re

import pytest
from chart import one, option, rendered
from tool_scripts import load_tool

from pocket_backend.cli.inspect import _PROCESS_BYTES

sizing = load_tool("size_deployment")


def limit_of(name: str) -> tuple[int, int, int]:
    """(memory limit, KV tokens, shm) of a value set's servers; bytes."""
    pod = one(rendered(name), "Deployment", "-triton")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [shm] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    tokens = option(container, "kv-cache-tokens")
    assert tokens is not None
    return (
        quantity(container["resources"]["limits"]["memory"]),
        int(tokens),
        quantity(shm["emptyDir"]["sizeLimit"]),
    )


def quantity(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1 << 20, "Gi": 1 << 30}[unit]


def test_the_example_is_current() -> None:
    page = sizing.PAGE.read_text()
    assert page == sizing.render(page), "run `python tools/size_deployment.py --docs`"


def test_the_demo_fits_its_limit() -> None:
    model, context = sizing.describe(None, "auto")
    assert model.kv_per_token == sizing.kv_bytes_per_token(30, 3, 64) == 23040
    assert context == 8192
    limit, tokens, shm = limit_of("demo")
    assert sizing.memory_limit(model, tokens, shm) <= limit


def test_production_fits_its_limit_without_waste() -> None:
    limit, tokens, shm = limit_of("production")
    needed = sizing.memory_limit(sizing.EXAMPLE[0], tokens, shm)
    assert needed <= limit <= 1.2 * needed


def test_the_process_is_that_of_inspect() -> None:
    assert sizing.PROCESS == _PROCESS_BYTES


def test_formulas() -> None:
    model = sizing.Model("m", 1000 << 20, 1024)
    load = sizing.Load(
        requests_per_second=2.0,
        prompt_tokens=300,
        answer_tokens=100,
        tokens_per_second=100.0,
        streams=10,
    )
    found = sizing.size(model, load, 4096, 64 << 20)
    assert found.kv_tokens == 2 * 10 * 400
    assert found.memory == (1150 + 150 + 256 + 64 << 20) + found.kv_tokens * 1024
    assert found.needed_tokens_per_second == 200.0
    assert found.servers == 3  # 200 / 70
    assert found.seconds_per_answer == 10.0
    assert found.open_requests == 20.0
    long = sizing.size(model, load, 100_000, 0)
    assert long.kv_tokens == 100_000, "one request of full length must fit"
    assert sizing.size(model, load, 16001, 0).kv_tokens == 16016, "whole blocks"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"streams": 0}, "streams: got 0"),
        ({"requests_per_second": 0.0}, "requests_per_second"),
        ({"prompt_tokens": 9000}, "max_model_len is 8192"),
    ],
)
def test_impossible_figures(change: dict[str, float], reason: str) -> None:
    model, load, context, shm = sizing.EXAMPLE
    with pytest.raises(ValueError, match=reason):
        sizing.size(model, dataclasses.replace(load, **change), context, shm)
