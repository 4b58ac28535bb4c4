"""What a client sent becomes one validated request, or an error that names the field."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocket_backend.api import InvalidRequestError, SamplingParams, UnsupportedFeatureError
from pocket_backend.api.errors import PocketLLMError
from pocket_backend.triton.fields import BY_NAME, FIELDS, REFUSED
from pocket_backend.triton.request import Parameters, parse_parameters, parse_request

CHAT = json.dumps([{"role": "user", "content": "hi"}])


def test_defaults() -> None:
    prompt, parameters = parse_request({"text_input": "x"}, {})
    assert prompt.text == "x"
    assert parameters == Parameters(sampling=SamplingParams(), stream=False)


def test_tensors_parameters_and_json_mean_the_same() -> None:
    fields = {"temperature": 0.5, "max_tokens": 7, "top_k": 3, "seed": 11, "ignore_eos": True}
    as_tensors = parse_request({"text_input": "x", **fields}, {})[1]
    as_parameters = parse_request({"text_input": "x"}, fields)[1]
    as_json = parse_request({"text_input": "x", "sampling_parameters": json.dumps(fields)}, {})[1]
    assert as_tensors == as_parameters == as_json
    assert as_tensors.sampling == SamplingParams(
        temperature=0.5, max_tokens=7, top_k=3, seed=11, ignore_eos=True
    )


@pytest.mark.parametrize("name", ["stop", "stop_words", "bad_words"])
def test_a_list_of_strings_as_a_request_parameter_is_json(name: str) -> None:
    """Triton's request parameters are no lists; taken literally, the string would never match."""
    found = parse_request({"text_input": "x"}, {name: '["United", "\\n\\n"]'})[1].sampling
    assert getattr(found, BY_NAME[name].name) == ("United", "\n\n")
    for literal in ("United", "[", '["a", 1]', '[["a"]]', "[]x"):
        found = parse_request({"text_input": "x"}, {name: literal})[1].sampling
        assert getattr(found, BY_NAME[name].name) == (literal,)
    tensor = parse_request({"text_input": "x", name: '["a"]'}, {})[1].sampling
    assert getattr(tensor, BY_NAME[name].name) == ('["a"]',)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", [3, 256]),
        ("end_id", 256),
        ("stop_token_ids", [1, 256]),
        ("bad_token_ids", [256]),
        ("allowed_token_ids", [256, 1]),
        ("logit_bias", '{"256": 1}'),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_under_the_name_that_was_sent(
    name: str, value: object
) -> None:
    fields = {"text_input": "x", name: value}
    if name == "input_ids":
        del fields["text_input"]
    parse_request(fields, {}, vocab_size=257)
    with pytest.raises(InvalidRequestError, match=f"^{name}: got 256; .*from 0 to 255") as caught:
        parse_request(fields, {}, vocab_size=256)
    assert caught.value.field == name


def test_priorities_are_symmetric() -> None:
    """Triton's HTTP front end reads 2^31 as -2^31: who asks for the last place gets no first."""
    for value in (2**31 - 1, 1 - 2**31):
        assert parse_request({"text_input": "x", "priority": value}, {})[1].priority == value
    with pytest.raises(InvalidRequestError, match=r"^priority: got -2147483648; .*-2147483647 to"):
        parse_request({"text_input": "x", "priority": -(2**31)}, {})


def test_every_length_that_is_limited_is_documented() -> None:
    for field in FIELDS:
        for limit in (field.max_items, field.max_chars):
            assert str(limit or "") in field.range, field.name


@pytest.mark.parametrize(
    ("alias", "field"), [(a, f.name) for f in FIELDS for a in f.aliases if f.role == "sampling"]
)
def test_aliases(alias: str, field: str) -> None:
    value: object = "x" if field == "stop" else 1
    _, parameters = parse_request({"text_input": "x", alias: value}, {})
    expected = ("x",) if field == "stop" else 1
    assert getattr(parameters.sampling, field) == expected


def test_same_value_twice_is_fine_and_different_values_are_not() -> None:
    parse_request({"text_input": "x", "seed": 1, "random_seed": 1}, {"seed": 1})
    with pytest.raises(InvalidRequestError, match=r"^random_seed: given twice.*seed"):
        parse_request({"text_input": "x", "seed": 1, "random_seed": 2}, {})


def test_null_is_absent() -> None:
    nothing = dict.fromkeys(f.name for f in FIELDS if f.role != "prompt")
    in_json = {"text_input": "x", "sampling_parameters": json.dumps(nothing)}
    assert parse_request(in_json, nothing)[1] == Parameters()


BAD = [
    ({"max_tokens": 0}, "max_tokens: got 0"),
    ({"max_tokens": -1}, "max_tokens: got -1"),
    ({"max_tokens": 1.5}, "max_tokens: got 1.5"),
    ({"max_tokens": True}, "max_tokens: got True"),
    ({"max_tokens": "7"}, "max_tokens: got '7'"),
    ({"max_tokens": [1, 2]}, "max_tokens: got "),
    ({"temperature": math.nan}, "temperature: got nan"),
    ({"temperature": math.inf}, "temperature: got inf"),
    ({"temperature": -0.1}, "temperature: got -0.1"),
    ({"temperature": "hot"}, "temperature: got 'hot'"),
    ({"top_p": 0.0}, "top_p: got 0.0"),
    ({"runtime_top_p": 1.5}, "runtime_top_p: got 1.5"),
    ({"random_seed": 2**64}, "random_seed: got "),
    ({"min_length": 5, "max_tokens": 2}, "min_length: got 5; must not exceed max_tokens"),
    ({"stream": 1}, "stream: got 1"),
    ({"stop": [""]}, "stop: got ''"),
    ({"stop": ["x"] * 17}, "stop: 17 items"),
    ({"stop": "x" * 2000}, "stop: got "),
    ({"stop_token_ids": [-1]}, "stop_token_ids: got -1"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids: got 'a'"),
    ({"stop_token_ids": list(range(1000))}, "stop_token_ids: 1000 items"),
    ({"bad_token_ids": [-1]}, "bad_token_ids: got -1"),
    ({"bad_token_ids": [1] * 1025}, "bad_token_ids: 1025 items"),
    ({"allowed_token_ids": []}, "allowed_token_ids: got ()"),
    ({"allowed_token_ids": [3] * 8193}, "allowed_token_ids: 8193 items"),
    ({"logit_bias": "[]"}, "logit_bias: got "),
    ({"logit_bias": '{"x": 1}'}, "logit_bias: got 'x'"),
    ({"logit_bias": '{"1": "a"}'}, "logit_bias: got 'a'"),
    ({"sampling_parameters": "{"}, "sampling_parameters: not valid JSON"),
    ({"sampling_parameters": "[]"}, "sampling_parameters: got "),
    ({"sampling_parameters": '{"temperature": NaN}'}, "sampling_parameters: not valid JSON"),
    ({"sampling_parameters": '{"text_input": "y"}'}, "sampling_parameters: must not hold"),
    ({"sampling_parameters": "[" * 100_000}, "sampling_parameters: not valid JSON"),
    ({"sampling_parameters": '{"stop": ' + "[" * 40 + "]" * 40 + "}"}, "sampling_parameters: nest"),
    ({"timeout_ms": 0}, "timeout_ms: got 0"),
    ({"priority": 2**31}, "priority: got "),
    ({"cache_salt": "x" * 300}, "cache_salt: 300 characters"),
    ({"n": 0}, "n: got 0"),
    ({"num_return_sequences": 5_000_000}, "num_return_sequences: got 5000000"),
    ({"beam_width": 4}, "unsupported: beam_width"),
    ({"bad_words": ["x"] * 50_000}, "bad_words: 50000 items; at most 32"),
    ({"bad_words": ["x" * 129]}, "bad_words: got 'xxx"),
    ({"exclude_input_in_output": False}, "unsupported: exclude_input_in_output"),
    ({"return_log_probs": 1}, "return_log_probs: got 1"),
    ({"logprobs": 21}, "logprobs: got 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: got -1"),
    ({"top_logprobs": 3}, "unsupported: top_logprobs: use logprobs"),
    ({"best_of": 2}, "unsupported: best_of: outputs are not ranked; use n"),
    ({"return_perf_metrics": True}, "unsupported: return_perf_metrics: use return_timings"),
    ({"guided_json": "{}"}, "unsupported: guided_json"),
    ({"temprature": 1.0}, "temprature: unknown field"),
    ({"x" * 5000: 1.0}, "x" * 64 + "...: unknown field"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
@pytest.mark.parametrize("way", ["tensors", "parameters"])
def test_bad_values_are_refused_by_name(fields: dict[str, object], message: str, way: str) -> None:
    tensors, parameters = (fields, {}) if way == "tensors" else ({}, fields)
    with pytest.raises(InvalidRequestError) as caught:
        parse_request({"text_input": "x", **tensors}, parameters)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "text_input: got none; send exactly one"),
        ({"text_input": ""}, "text_input: must not be empty"),
        ({"input_ids": []}, "input_ids: must not be empty"),
        ({"messages": "[]"}, "messages: must not be empty"),
        ({"text_input": "x", "messages": CHAT}, "text_input: got text_input and messages"),
        ({"messages": "{}"}, "messages: must"),
        ({"messages": '{"role": "user"}'}, "messages: must be a JSON list of objects"),
        ({"messages": '["x"]'}, "messages: must be a JSON list of objects"),
        ({"messages": "nonsense"}, "messages: not valid JSON"),
        ({"text_input": "x", "tools": "[]"}, "tools: only goes with messages"),
        ({"messages": CHAT, "chat_template_kwargs": "[]"}, "chat_template_kwargs: got "),
    ],
)
def test_prompts_that_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request(fields, {})
    assert str(caught.value).startswith(message)


def test_values_that_mean_what_we_do_are_accepted() -> None:
    parse_request(
        {
            "text_input": "x", "n": 1, "beam_width": 1, "bad_words": [""], "stop_words": [""],
            "return_log_probs": False, "exclude_input_in_output": True,
            "return_finish_reason": True, "return_num_input_tokens": False, "top_k": -1,
        },
        {"triton_enable_empty_final_response": True, "id": "a", "Traceparent": "00-1-2-3"},
    )  # fmt: skip


@pytest.mark.parametrize(
    "flag", ["return_logprobs", "return_log_probs", "return_cumulative_logprob"]
)
def test_flags_for_log_probabilities_ask_for_the_token_only(flag: str) -> None:
    _, alone = parse_request({"text_input": "x", flag: True}, {})
    _, both = parse_request({"text_input": "x", flag: True}, {"logprobs": 3})
    _, off = parse_request({"text_input": "x", flag: False}, {})
    found = [parameters.sampling.logprobs for parameters in (alone, both, off)]
    assert found == [0, 3, None]


def test_end_id_joins_the_stop_tokens() -> None:
    _, parameters = parse_request({"text_input": "x", "end_id": 2, "stop_token_ids": [5]}, {})
    assert parameters.sampling.stop_token_ids == (5, 2)


def test_continue_final_message_leaves_the_turn_open() -> None:
    prompt, _ = parse_request({"messages": CHAT, "continue_final_message": True}, {})
    assert prompt.continue_final_message
    assert not prompt.add_generation_prompt


def test_generator_refuses_prompts_as_fields() -> None:
    with pytest.raises(InvalidRequestError, match="takes its prompt as the input_ids tensor"):
        parse_parameters({}, {"text_input": "x"})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_names_are_not_fields(name: str) -> None:
    assert name not in BY_NAME
    with pytest.raises(UnsupportedFeatureError, match=name):
        parse_request({"text_input": "x"}, {name: 1})


_PARAMETERS = st.builds(
    Parameters,
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(64, 1000),
        min_tokens=st.integers(0, 64),
        temperature=st.floats(0, 100, width=32),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 1000),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(0, 2**64 - 1),
        repetition_penalty=st.floats(0.1, 10),
        logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=5),
        stop=st.lists(st.text(min_size=1, max_size=9), max_size=4).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 1000), max_size=4).map(tuple),
        bad_token_ids=st.lists(st.integers(0, 1000), max_size=4).map(tuple),
        bad_words=st.lists(st.text(min_size=1, max_size=9), max_size=4).map(tuple),
        n=st.integers(1, 128),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        allowed_token_ids=st.none() | st.lists(st.integers(1001, 2000), min_size=1).map(tuple),
        ignore_eos=st.booleans(),
        skip_special_tokens=st.booleans(),
    ),
    stream=st.booleans(),
    priority=st.integers(-100, 100),
    deadline_seconds=st.none() | st.integers(1, 100_000).map(lambda ms: ms / 1000),
    cache_salt=st.text(max_size=10),
    timings=st.booleans(),
)


@given(_PARAMETERS)
def test_json_between_the_models_loses_nothing(parameters: Parameters) -> None:
    assert parse_parameters({"sampling_parameters": parameters.to_json()}, {}) == parameters


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted({*BY_NAME, *REFUSED, "zz"})), _JSON, max_size=5))
def test_any_input_is_accepted_or_refused_with_a_typed_error(values: dict[str, object]) -> None:
    for tensors, parameters in ((values, {}), ({"text_input": "x"}, values)):
        with contextlib.suppress(PocketLLMError):
            parse_request(tensors, parameters)[1].to_json()
