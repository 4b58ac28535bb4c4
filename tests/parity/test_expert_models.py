"""Qwen2-MoE and Qwen3-MoE in the C++ engine against Transformers, on tiny random weights.

As in test_hf_models.py: float32 on both sides, so that what is left is the order of additions; 2e-4
of logits with a standard deviation above 0.5 at every position, at once and in chunks. A choice of
experts that two roundings made differently would show as an error of whole units.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, Part
from hf_parity import TOKENS, TOLERANCE, check_logits, check_rows, exact
from safetensors.torch import load_file, save_file
from tiny_experts import FIELDS, qwen2_moe, qwen3_moe, stacked_weights, write_gguf
from tiny_gguf import FORMATS, SUPER_BLOCK_FORMATS
from tiny_hf import CONTEXT, edit_config, logits_of, random_tokens, save

import pocket_cpp_core
from pocket_backend.api import EngineArgs
from pocket_backend.cli.main import main
from pocket_backend.executors.registry import choose_backend

pytestmark = pytest.mark.parity

ISAS = tuple(pocket_cpp_core.build_info()["isas"])
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (qwen2_moe, {}),
    "qwen2, normalised, tied, some layers dense": (
        qwen2_moe,
        {
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "qwen2 without biases, sliding": (
        qwen2_moe,
        {"qkv_bias": False, "use_sliding_window": True, "sliding_window": 23},
    ),
    "qwen3": (qwen3_moe, {}),
    "qwen3, not normalised, first layer dense": (
        qwen3_moe,
        {"norm_topk_prob": False, "mlp_only_layers": [0], "num_hidden_layers": 3},
    ),
    "qwen3 with all experts, one shared key head": (
        qwen3_moe,
        {"num_experts": 4, "num_experts_per_tok": 4, "num_key_value_heads": 1},
    ),
    "qwen3 with one of 40 experts": (
        qwen3_moe,
        {"num_experts": 40, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "qwen3 sliding in all layers": (
        qwen3_moe,
        {"use_sliding_window": True, "sliding_window": 31},
    ),
}
PAIR = ["qwen2", "qwen3"]


def model_of(name: str) -> Any:
    make, fields = CASES[name]
    return make(**fields)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path, name):
    model = model_of(name)
    check_logits(save(model, tmp_path), model)


@pytest.mark.parametrize("name", PAIR)
def test_stacks_of_experts_are_the_same_bits(tmp_path, name):
    """Transformers writes experts one by one; in memory it has stacks, which some files keep."""
    model = model_of(name)
    directory = save(model, tmp_path)
    names = load_file(directory / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.6.up_proj.weight" in names
    tokens = random_tokens(60)
    expected = exact(directory).all_logits(tokens)
    stacks = stacked_weights(model)
    assert "model.layers.1.mlp.experts.gate_up_proj" in stacks
    save_file(stacks, directory / "model.safetensors")
    assert np.array_equal(exact(directory).all_logits(tokens), expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *PAIR,
        "qwen2, normalised, tied, some layers dense",
        "qwen3, not normalised, first layer dense",
    ],
)
def test_a_gguf_file_of_the_same_weights_gives_the_same_bits(tmp_path, name, fused):
    model = model_of(name)
    directory, file = save(model, tmp_path / "directory"), tmp_path / "model.gguf"
    if model.config.tie_word_embeddings:
        del model.lm_head
    write_gguf(file, model, fused=fused, norm_key=name not in PAIR)
    tokens = random_tokens(60)
    assert np.array_equal(exact(file).all_logits(tokens), exact(directory).all_logits(tokens))


@pytest.mark.parametrize("weight_format", FORMATS + SUPER_BLOCK_FORMATS)
def test_formats_of_experts(tmp_path, weight_format):
    """Every format as stacks [experts, out, in], against the weights that the file holds."""
    wide = weight_format in SUPER_BLOCK_FORMATS
    make = qwen2_moe if weight_format in ("Q8_0", "Q6_K", "F16") else qwen3_moe
    size = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "head_dim": 64,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    if make is qwen3_moe:
        del size["shared_expert_intermediate_size"]
    model = make(**(size if wide else {}))
    path = tmp_path / "model.gguf"
    write_gguf(path, model, weight_format)
    check_logits(path, model)


@pytest.fixture
def rounded_inputs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rounds the inputs of a model's linear layers as the int8 path does, routers excepted.

    Each becomes scale * round(x / scale) per 32 columns, scale = amax / 127. What is left between
    engine and reference then is the order of additions only.
    """
    linear = torch.nn.functional.linear

    def rounded(x: Any, weight: Any, bias: Any = None) -> Any:
        if weight.shape[0] <= FIELDS["num_experts"]:  # a router, or the gate of the shared expert
            return linear(x, weight, bias)
        blocks = x.reshape(*x.shape[:-1], -1, 32)
        scale = blocks.abs().amax(dim=-1, keepdim=True) / 127.0
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))
        return linear((torch.round(blocks / safe) * scale).reshape(x.shape), weight, bias)

    def activate(model: Any) -> None:
        model.set_experts_implementation("eager")
        monkeypatch.setattr(torch.nn.functional, "linear", rounded)

    return activate


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("weight_format", ["Q8_0", "Q4_0", "Q5_1"])
def test_the_int8_path_rounds_as_the_dense_layers_do(tmp_path, name, weight_format, rounded_inputs):
    """Tokens at position 0 against a reference that rounds alike.

    A code that float noise moves across a rounding boundary shows in that token only, so nearly all
    agree to float noise (1e-4 of the logits' deviation) and the rest to a code's worth, at most a
    tenth here; without the reference's rounding the errors are several times larger.
    """
    model = model_of(name)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, weight_format)
    tokens = random_tokens(40)
    batch = torch.tensor([[token] for token in tokens])
    with torch.no_grad():
        unrounded = model(batch).logits[:, 0].numpy()
        rounded_inputs(model)
        expected = model(batch).logits[:, 0].numpy()
    driver = Driver(path, context=CONTEXT, kv_dtype="f32")
    got = np.stack([driver.all_logits([token])[0] for token in tokens])
    worst = np.abs(got - expected).max(axis=1) / expected.std()
    assert (worst < 1e-4).mean() >= 0.75, worst
    assert worst.max() < 0.1, worst
    assert np.abs(got - expected).mean() < 0.25 * np.abs(got - unrounded).mean()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(model_of(name), tmp_path_factory.mktemp("experts")) for name in PAIR}


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("weights", [None, "q8_0", "q4_0"])
def test_rows_do_not_depend_on_their_step(directories, name, weights):
    check_rows(directories[name], isas=ISAS, weights=weights)


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize("weights", [None, "q8_0"])
def test_decoding_in_batches_of_1_to_32(directories, name, weights):
    """One sequence's next tokens beside 0 to 31 others that decode, too."""
    options = {"rows": 32, "context": 32, "weights": weights}
    driver = Driver(directories[name], threads=2, **options)
    prompts = [random_tokens(4 + row % 9, seed=row) for row in range(32)]
    alone = []
    for row, prompt in enumerate(prompts):
        driver.logits(Part(prompt, 0, row))
        alone.append(driver.logits(Part([row], len(prompt), row))[0])
    for count in (1, 2, 3, 7, 8, 9, 16, 31, 32):
        parts = [Part([row], len(prompts[row]), row) for row in range(count)]
        assert np.array_equal(driver.logits(*parts), np.stack(alone[:count])), count


@pytest.mark.parametrize("name", PAIR)
@pytest.mark.parametrize(
    "part",
    [
        "mlp.gate.weight",
        "mlp.experts.0.gate_proj.weight",
        "mlp.experts.6.up_proj.weight",
        "mlp.experts.3.down_proj.weight",
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "mlp.shared_expert_gate.weight",
    ],
)
def test_no_weight_is_ignored(tmp_path, directories, name, part):
    weights = load_file(directories[name] / "model.safetensors")
    if f"model.layers.1.{part}" not in weights:
        assert name == "qwen3"
        assert "shared" in part
        return
    weights[f"model.layers.1.{part}"][0] += 0.5
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directories[name] / "config.json").read_text())
    tokens = random_tokens(TOKENS)
    difference = exact(tmp_path).all_logits(tokens) - exact(directories[name]).all_logits(tokens)
    assert np.abs(difference).max() > 0.01


@pytest.mark.parametrize(
    "fields",
    [{"norm_topk_prob": None}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}],
    ids=str,
)
def test_fields_are_not_ignored(tmp_path, fields):
    directory = save(model_of("qwen3"), tmp_path)
    tokens = random_tokens(60)
    expected = exact(directory).all_logits(tokens)
    edit_config(directory, **fields)
    assert np.abs(exact(directory).all_logits(tokens) - expected).max() > 0.01


def test_the_number_of_experts_by_its_other_name(tmp_path):
    directory = save(model_of("qwen3"), tmp_path)
    tokens = random_tokens(20)
    expected = exact(directory).all_logits(tokens)
    edit_config(directory, num_experts=None, num_local_experts=7)
    assert np.array_equal(exact(directory).all_logits(tokens), expected)
    edit_config(directory, num_experts=7, num_local_experts=None)
    assert np.array_equal(exact(directory).all_logits(tokens), expected)


def test_which_layers_of_qwen2_moe_slide_where_the_file_does_not_list_them(tmp_path):
    """Every other one before max_window_layers, as Transformers' default says."""
    sliding = {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 4}
    model = qwen2_moe(num_hidden_layers=5, **sliding)
    listed = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert listed == [True, False, True, False, False]
    directory = save(model, tmp_path)
    tokens = random_tokens(60)
    expected = exact(directory).all_logits(tokens)
    assert np.abs(expected - logits_of(model, tokens)).max() < TOLERANCE
    edit_config(directory, layer_types=None)
    assert np.array_equal(exact(directory).all_logits(tokens), expected)


def test_the_engine_is_chosen_and_described(tmp_path, directories, capsys):
    file = tmp_path / "model.gguf"
    model = model_of("qwen2")
    write_gguf(file, model, "Q8_0")
    for path in (directories["qwen2"], file):
        assert choose_backend(EngineArgs(model=str(path))).name == "cpp"
        info = pocket_cpp_core.inspect_model(path)
        assert (info["experts"], info["experts_used"]) == (7, 3)
        assert main(["inspect", "--json", str(path)]) == 0
        found = json.loads(capsys.readouterr().out)
        total = sum(values.numel() for values in model.parameters())
        unused = 2 * 4 * 3 * 32 * 64  # layers, experts, matrices of one
        assert found["parameters"] == total
        assert found["active_parameters"] == total - unused
        assert (found["shape"]["experts"], found["shape"]["experts_used"]) == (7, 3)
        assert found["serving"]["backend"] == "cpp"
        assert main(["inspect", str(path)]) == 0
        text = capsys.readouterr().out
        assert f"; {total - unused:,} active for a token" in text
        assert ", 7 experts, 3 for a token" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None, "num_local_experts": None}, "num_experts is missing"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"num_experts_per_tok": 8}, "expert_used_count (8) must be at most expert_count (7)"),
        ({"num_experts_per_tok": 0}, "expert_used_count: got 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: got 0; must be at least 1"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers: must list numbers of layers"),
        ({"mlp_only_layers": [1]}, "blk.1.ffn_gate.weight is missing"),
        ({"moe_intermediate_size": 64}, "ffn_gate.0.weight has shape [32, 64]; expected [64, 64]"),
        ({"model_type": "qwen3_vl_moe_text"}, "model_type: got 'qwen3_vl_moe_text'; supported"),
        ({"model_type": "qwen3"}, "blk.0.ffn_gate.weight is missing"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
    ],
    ids=str,
)
def test_directories_that_are_refused(tmp_path, directories, fields, message):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(directories["qwen3"] / name)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    config = {key: value for key, value in (config | fields).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((pocket_cpp_core.Unsupported, pocket_cpp_core.ModelFileError)) as caught:
        exact(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["experts.3.down_proj", "experts.0.gate_proj", "gate"])
def test_a_missing_expert_is_named(tmp_path, directories, missing):
    weights = load_file(directories["qwen3"] / "model.safetensors")
    del weights[f"model.layers.1.mlp.{missing}.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directories["qwen3"] / "config.json").read_text())
    with pytest.raises(pocket_cpp_core.ModelFileError, match=r"tensor blk\.1\.ffn.* is missing"):
        exact(tmp_path)
