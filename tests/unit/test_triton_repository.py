"""The checked-in model repository and docs follow from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pocket_backend.triton import repository
from pocket_backend.triton.fields import BY_NAME, FIELDS, REFUSED

ROOT = Path(__file__).resolve().parents[2]

VLLM_BACKEND = {
    "text_input", "stream", "sampling_parameters", "exclude_input_in_output",
    "return_finish_reason", "return_cumulative_logprob", "return_logprobs",
    "return_num_input_tokens", "return_num_output_tokens",
}  # fmt: skip
TENSORRT_LLM = {
    "text_input", "max_tokens", "top_k", "top_p", "temperature", "min_tokens", "min_length",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "random_seed",
    "stop_words", "bad_words", "end_id", "beam_width", "num_return_sequences", "return_log_probs",
}  # fmt: skip


@pytest.mark.parametrize("model", sorted(repository.render_all()))
def test_config_is_what_the_code_renders(model: str) -> None:
    checked_in = (ROOT / "model_repository" / model / "config.pbtxt").read_text()
    assert checked_in == repository.render_all()[model], (
        "run: python -m pocket_backend.triton.repository"
    )


def test_documented_table_is_current() -> None:
    document = (ROOT / "docs" / "triton.md").read_text()
    assert repository.TABLE_BEGIN in document
    assert document == repository.with_table(document), (
        "run: python -m pocket_backend.triton.repository"
    )


def test_names_of_the_two_other_backends_are_inputs() -> None:
    inputs = {name for name, *_ in repository.user_inputs()}
    assert inputs.issuperset(VLLM_BACKEND)
    assert inputs.issuperset(TENSORRT_LLM)


def test_names_are_unique_and_refused_ones_are_not_fields() -> None:
    names = [name for field in FIELDS for name in field.names]
    assert len(names) == len(set(names)) == len(BY_NAME)
    assert not set(REFUSED) & set(BY_NAME)


def test_every_ensemble_tensor_is_produced_and_every_output_mapped() -> None:
    config = repository.render_all()["pocketllm"]
    produced = set(re.findall(r'output_map { key: "\w+" value: "(\w+)" }', config))
    consumed = set(re.findall(r'input_map { key: "\w+" value: "(\w+)" }', config))
    inputs = {name for name, *_ in repository.user_inputs()}
    outputs = set(re.findall(r'name: "(\w+)"', config.split("output [")[1].split("]\n]")[0]))
    outputs &= set(re.findall(r'name: "(\w+)"', config.split("\noutput [")[1].split("\n]")[0]))
    assert consumed - produced == inputs
    assert outputs <= produced
    assert produced <= outputs | consumed
