"""Writes the ``config.pbtxt`` files of the model repository, and the field table of the docs.

The files are checked in and valid as they are for ``tritonserver --model-repository``.  They
follow from the field table, so a test compares them with what this module renders.

    python -m pocket_backend.triton.repository [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pocket_backend.triton.chunks import OUTPUTS
from pocket_backend.triton.fields import FIELDS, REFUSED, Field, Role

ROOT = Path(__file__).resolve().parents[2]
_NOTICE = (
    "# Written by pocket_backend.triton.repository from the field table; not edited by hand.\n"
)
TABLE_BEGIN = "<!-- fields: begin -->"
TABLE_END = "<!-- fields: end -->"

# Tunables as `parameters`: empty means the default. POCKETLLM_<NAME> overrides each.
_TOKENIZER_PARAMETERS = ("model", "tokenizer_path")
_GENERATOR_PARAMETERS = (
    "model", "tokenizer_path", "backend", "max_model_len", "max_batch_size",
    "max_num_batched_tokens", "kv_cache_tokens", "kv_cache_dtype", "precision", "threads",
    "max_queue", "enable_prefix_caching", "drain_seconds", "cancellation_check_period_ms",
    "stream_interval_ms",
)  # fmt: skip
_TO_DETOKENIZER = ("context_ids", "token_ids", "text_range", "skip_special_tokens", "stream_key",
                   "error")  # fmt: skip
_TO_CLIENT = ("token_ids", "finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens",
              "num_cached_tokens", "sequence_index", "cumulative_logprob", "logprobs",
              "prompt_logprobs", "timings")  # fmt: skip

Tensor = tuple[str, str, str, bool]
"""Name, data type, dims, optional."""


def render_all() -> dict[str, str]:
    """Content of every ``config.pbtxt`` by model name."""
    return {
        "tokenizer": _tokenizer(),
        "generator": _generator(),
        "detokenizer": _detokenizer(),
        "pocketllm": _ensemble(),
    }


def user_inputs() -> list[Tensor]:
    """The inputs of the ensemble and of the tokenizer: a field under each of its names."""
    return [
        (name, *field.tensor, True)
        for field in FIELDS
        if not field.parameter_only
        for name in field.names
    ]


def _tokenizer() -> str:
    outputs = [
        ("input_ids", "TYPE_INT32", "-1"),
        ("sampling_parameters", "TYPE_STRING", "1"),
        ("errors_as_output", "TYPE_BOOL", "1"),
    ]
    return _model("tokenizer", user_inputs(), outputs, parameters=_TOKENIZER_PARAMETERS)


def _generator() -> str:
    inputs: list[Tensor] = [
        ("input_ids", "TYPE_INT32", "-1", True),
        ("sampling_parameters", "TYPE_STRING", "1", True),
        ("stream", "TYPE_BOOL", "1", True),
        ("errors_as_output", "TYPE_BOOL", "1", True),
        ("control", "TYPE_STRING", "1", True),
    ]
    return _model("generator", inputs, OUTPUTS, parameters=_GENERATOR_PARAMETERS, decoupled=True)


def _detokenizer() -> str:
    kinds = {name: (data_type, dims) for name, data_type, dims in OUTPUTS}
    optional = {"skip_special_tokens", "stream_key", "error"}
    inputs = [(name, *kinds[name], name in optional) for name in _TO_DETOKENIZER]
    return _model(
        "detokenizer", inputs, [("text_output", "TYPE_STRING", "-1")],
        parameters=_TOKENIZER_PARAMETERS,
    )  # fmt: skip


def _ensemble() -> str:
    kinds = {name: (data_type, dims) for name, data_type, dims in OUTPUTS}
    outputs = [("text_output", "TYPE_STRING", "-1")]
    outputs += [(name, *kinds[name]) for name in _TO_CLIENT]
    prompt = {
        "input_ids": "_prompt_ids",
        "sampling_parameters": "_parameters",
        "errors_as_output": "_errors_as_output",
    }
    generated = dict.fromkeys((*_TO_DETOKENIZER, *_TO_CLIENT))
    steps = [
        _step(
            "tokenizer",
            {name: name for name, _, _, _ in user_inputs()},
            prompt,
        ),
        _step(
            "generator",
            prompt,
            {name: _wire(name) for name in generated},
        ),
        _step(
            "detokenizer",
            {name: _wire(name) for name in _TO_DETOKENIZER},
            {"text_output": "text_output"},
        ),
    ]
    return (
        f'{_NOTICE}name: "pocketllm"\nplatform: "ensemble"\nmax_batch_size: 0\n'
        f"{_tensors('input', user_inputs())}{_tensors('output', _required(outputs))}"
        f"ensemble_scheduling {{\n  step [\n{','.join(steps)}\n  ]\n}}\n"
    )


def _wire(name: str) -> str:
    """Name of a tensor inside the ensemble: only what clients may see keeps its own."""
    return name if name in _TO_CLIENT else f"_{name}"


def _required(outputs: Iterable[tuple[str, str, str]]) -> list[Tensor]:
    return [(name, data_type, dims, False) for name, data_type, dims in outputs]


def _model(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Iterable[tuple[str, str, str]],
    *,
    parameters: Sequence[str],
    decoupled: bool = False,
) -> str:
    policy = "model_transaction_policy { decoupled: true }\n" if decoupled else ""
    tunables = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "" }} }}\n' for key in parameters
    )
    return (
        f'{_NOTICE}name: "{name}"\nbackend: "python"\nmax_batch_size: 0\n{policy}'
        f"{_tensors('input', inputs)}{_tensors('output', _required(outputs))}"
        f"instance_group [ {{ kind: KIND_CPU count: 1 }} ]\n{tunables}"
    )


def _tensors(kind: str, tensors: Sequence[Tensor]) -> str:
    lines = ",\n".join(
        f'  {{ name: "{name}" data_type: {data_type} dims: [ {dims} ]'
        f"{' optional: true' if optional else ''} }}"
        for name, data_type, dims, optional in tensors
    )
    return f"{kind} [\n{lines}\n]\n"


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = "".join(
        f'      {kind} {{ key: "{key}" value: "{value}" }}\n'
        for kind, pairs in (("input_map", inputs), ("output_map", outputs))
        for key, value in pairs.items()
    )
    return f'    {{\n      model_name: "{model}"\n      model_version: -1\n{maps}    }}'


# --- documentation --------------------------------------------------------------------------------

_TITLES: dict[Role, str] = {
    "prompt": "Prompt: exactly one of `text_input`, `messages` and `input_ids`",
    "sampling": "Sampling",
    "serving": "Serving",
    "compatibility": "Accepted for other servers' clients",
}


def field_table() -> str:
    """Markdown: every field with type, default, range and aliases."""
    parts = []
    for role, title in _TITLES.items():
        rows = "".join(_row(field) for field in FIELDS if field.role == role)
        parts.append(
            f"**{title}**\n\n| Field | Type | Default | Range | Meaning |\n|---|---|---|---|---|\n"
            f"{rows}"
        )
    refused = "".join(f"| `{name}` | {reason} |\n" for name, reason in sorted(REFUSED.items()))
    parts.append(f"**Refused by name**\n\n| Field | Why |\n|---|---|\n{refused}")
    return "\n".join(parts)


def _row(field: Field) -> str:
    data_type, dims = field.tensor
    aliases = "".join(f", `{alias}`" for alias in field.aliases)
    kind = f"{data_type.removeprefix('TYPE_')}[{dims}]{' JSON' if field.kind == 'json' else ''}"
    if field.parameter_only:
        kind = f"{field.kind} (not a tensor)"
    return (
        f"| `{field.name}`{aliases} | {kind} | {field.default} | {field.range} | {field.help} |\n"
    )


def with_table(document: str) -> str:
    """``document`` with the text between the table's markers replaced by the current table."""
    head, _, rest = document.partition(TABLE_BEGIN)
    _, _, tail = rest.partition(TABLE_END)
    return f"{head}{TABLE_BEGIN}\n{field_table()}{TABLE_END}{tail}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the model repository's config.pbtxt files.")
    parser.add_argument("--check", action="store_true", help="only say which files are stale")
    options = parser.parse_args(argv)
    wanted = {
        ROOT / "model_repository" / name / "config.pbtxt": content
        for name, content in render_all().items()
    }
    document = ROOT / "docs" / "triton.md"
    if document.exists():
        wanted[document] = with_table(document.read_text())
    stale = [
        path for path, content in wanted.items()
        if not path.exists() or path.read_text() != content
    ]  # fmt: skip
    for path in stale:
        sys.stdout.write(f"{'stale' if options.check else 'writing'}: {path.relative_to(ROOT)}\n")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
