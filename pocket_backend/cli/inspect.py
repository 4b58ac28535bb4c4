"""`pocketllm inspect`: what a model is and what it needs, from its headers; no weight is loaded."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict, dataclass

from pocket_backend.api import EngineArgs, InvalidRequestError, PocketLLMError
from pocket_backend.cli import console
from pocket_backend.cli.exit_codes import OK
from pocket_backend.cli.options import Commands, add_json_option, model_path
from pocket_backend.executors.model_description import ModelDescription, Shape, describe_model

_KV_BYTES = {"auto": 2, "fp16": 2, "bf16": 2, "f32": 4, "int8": 1, "int8_per_token_head": 1}
_PROCESS_BYTES = 150 << 20
"""Python, tokenizer and workspace of a serving process: the bar of docs/benchmarks.md."""


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="describe a model without loading it",
        description="Architecture, tensor formats, tokenizer, memory at a given context and batch, "
        "and which backend serves it: from the headers of its files.",
    )
    parser.add_argument(
        "model", nargs="?", help="a GGUF file or a model directory (default: the demo model)"
    )
    parser.add_argument(
        "-c", "--max-model-len", "--ctx-size", type=int, help="context (default: the model's)"
    )
    parser.add_argument(
        "-b", "--max-batch-size", type=int, default=1, help="sequences of that length (1)"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, f32, fp16 or int8")
    parser.add_argument("--backend", default="auto", help="ask about this one")
    parser.add_argument("--template", action="store_true", help="print the chat template as well")
    add_json_option(parser, "everything")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which backend would serve a model, and why; or why none would."""

    backend: str | None
    reason: str
    kv_bytes_per_token: int | None = None
    """As that backend stores them; None if it does not say before it loads."""
    state_bytes: int = 0
    """Recurrent state of one sequence, beside its KV."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes at one context and batch; None where the files do not say enough."""

    context: int | None
    batch: int
    weights: int | None
    kv_per_token: int | None
    kv: int | None
    state: int
    """Recurrent states of all sequences, without snapshots."""
    process: int
    total: int | None
    available: int | None
    """Of this machine, now."""


def run(options: argparse.Namespace) -> int:
    """Print the description.

    Raises:
        PocketLLMError: the files cannot be described, or the options are out of range.
    """
    if options.max_batch_size < 1 or (options.max_model_len or 1) < 1:
        raise InvalidRequestError("--max-model-len, --max-batch-size: must be at least 1")
    path = model_path(options.model)
    args = EngineArgs(model=path, backend=options.backend, kv_cache_dtype=options.kv_cache_dtype)
    model = describe_model(path)
    verdict = judge(args)
    memory = memory_need(model, verdict, args, options.max_model_len, options.max_batch_size)
    if options.json:
        console.print_json(_as_dict(model, verdict, memory, template=options.template))
    else:
        _print(model, verdict, memory)
        if options.template and model.tokenizer.chat_template:
            print(f"\n{model.tokenizer.chat_template}")
    return OK


def judge(args: EngineArgs) -> Verdict:
    """Ask the registry, and then the backend as far as it answers without weights."""
    from pocket_backend.executors.registry import available_backends, choose_backend

    try:
        choice = choose_backend(args)
        name = choice.name
        if name not in available_backends():
            return Verdict(None, f"backend {name} is not part of this version")
        if name == "cpp":
            from pocket_backend.executors.cpp_engine import inspect_model
            from pocket_backend.executors.executor_options import BLOCK_SIZE

            info = inspect_model(args.model_path(), args.kv_cache_dtype)
            reason = f"the C++ engine knows architecture {info['architecture']!r} and its formats"
            kv_bytes = info["kv_bytes_per_block"] // BLOCK_SIZE
            return Verdict(name, reason, kv_bytes, info["state_bytes"])
    except PocketLLMError as error:
        return Verdict(None, str(error))
    missing = [
        package
        for package in ("torch", "transformers")
        if name == "torch" and importlib.util.find_spec(package) is None
    ]
    if missing:
        return Verdict(None, f"{' and '.join(missing)} not installed: pip install pocketllm[torch]")
    return Verdict(name, choice.reason)


def memory_need(
    model: ModelDescription, verdict: Verdict, args: EngineArgs, context: int | None, batch: int
) -> MemoryNeed:
    """``context``: tokens per sequence; None: the model's own."""
    from pocket_backend.executors.memory import available_memory

    context = context or model.shape.context
    weights = model.weight_bytes
    per_token = verdict.kv_bytes_per_token
    if per_token is None:
        per_token = model.shape.kv_bytes_per_token(_KV_BYTES[args.kv_cache_dtype])
    kv = None if per_token is None or context is None else per_token * context * batch
    state = verdict.state_bytes * batch
    total = None if kv is None or weights is None else weights + kv + state + _PROCESS_BYTES
    return MemoryNeed(
        context, batch, weights, per_token, kv, state, _PROCESS_BYTES, total, available_memory()
    )


def _as_dict(
    model: ModelDescription, verdict: Verdict, memory: MemoryNeed, *, template: bool
) -> dict[str, object]:
    found = asdict(model)
    found["path"] = str(model.path)
    found |= {
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "tensors": model.tensors,
    }
    if not template:
        found["tokenizer"]["chat_template"] = model.tokenizer.chat_template is not None
    return {**found, "serving": asdict(verdict), "memory_bytes": asdict(memory)}


def _print(model: ModelDescription, verdict: Verdict, memory: MemoryNeed) -> None:
    shape, text = model.shape, model.tokenizer
    formats = ", ".join(
        f"{item.name} {item.tensors} tensors"
        f" ({'size unknown' if item.bytes is None else console.amount(item.bytes)})"
        for item in model.formats
    )
    kv_heads = "/".join(map(str, sorted(set(shape.kv_heads)))) or "?"
    rows = [
        ("model", f"{model.path}"),
        ("name", model.name),
        ("container", f"{model.container}, {model.files} file{'s' * (model.files > 1)}"),
        ("architecture", model.architecture),
        ("parameters", f"{model.parameters:,} in {model.tensors} tensors{_active(model)}"),
        ("formats", formats),
        (
            "shape",
            f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads "
            f"({kv_heads} of keys), head {shape.head_dim}, ffn {shape.ffn}, vocab {shape.vocab}"
            + _experts(shape),
        ),
        ("context", f"{shape.context} tokens" + _window(shape.sliding_window)),
        (
            "tokenizer",
            f"{text.kind}, {text.tokens or '?'} tokens" if text.kind else "none in these files",
        ),
        ("chat template", _template(text.chat_template)),
        ("memory", _memory(memory)),
        (
            "served by",
            f"{verdict.backend}: {verdict.reason}"
            if verdict.backend
            else f"nothing here: {verdict.reason}",
        ),
    ]
    for label, value in rows:
        if value is not None:
            print(f"{label:14} {value}")


def _active(model: ModelDescription) -> str:
    if model.active_parameters == model.parameters:
        return ""
    return f"; {model.active_parameters:,} active for a token"


def _experts(shape: Shape) -> str:
    if not shape.experts:
        return ""
    return f", {shape.experts} experts, {shape.experts_used or '?'} for a token"


def _window(window: int | None) -> str:
    return f", sliding window {window}" if window else ""


def _template(template: str | None) -> str:
    if template is None:
        return "none: use it with --raw prompts"
    return f"{len(template)} characters (--template prints it)"


def _memory(memory: MemoryNeed) -> str:
    if memory.total is None or memory.weights is None or memory.kv is None:
        return "not known: the files do not say enough"
    fits = ""
    if memory.available is not None:
        room = console.amount(memory.available)
        fits = f"; {room} are free" + ("" if memory.total <= memory.available else ": too little")
    state = ""
    if memory.state:
        each = console.amount(memory.state // memory.batch)
        state = f"recurrent state {console.amount(memory.state)} ({memory.batch} x {each}), "
    return (
        f"about {console.amount(memory.total)}: weights {console.amount(memory.weights)}, KV cache "
        f"{console.amount(memory.kv)} ({memory.batch} x {memory.context} tokens of "
        f"{memory.kv_per_token} bytes), {state}process {console.amount(memory.process)}{fits}"
    )
