"""Memory and number of servers for a model and a load: the worksheet of docs/deploy.md.

    python tools/size_deployment.py model.gguf --prompt-tokens 800 --answer-tokens 250 \\
        --requests-per-second 1.5 --tokens-per-second 180 --streams 16
    python tools/size_deployment.py --docs      # writes the worked example of docs/deploy.md

The model's sizes come from its headers (`pocketllm inspect`); `--tokens-per-second` and `--streams`
are what `pocketllm bench` measured on one server: its rate, at that many open requests.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "deploy.md"
MIB = 1 << 20
PROCESS = 150 * MIB
"""The generator beside weights and KV: `pocketllm inspect` counts the same."""
OTHERS = 256 * MIB
"""Triton, tokenizer, detokenizer, supervisor: 150 MiB with the demo model; vocabularies add."""
WEIGHTS_FACTOR = 1.15
"""Weights are repacked for the kernels; the bar of docs/benchmarks.md."""
BLOCK = 16
UTILISATION = 0.7
"""Of what a server can do, on average at the peak; the rest is for bursts and lost nodes."""


@dataclass(frozen=True, slots=True)
class Model:
    """Bytes, as `pocketllm inspect` says."""

    name: str
    weights: int
    kv_per_token: int


@dataclass(frozen=True, slots=True)
class Load:
    """At the peak. Tokens are means; ``tokens_per_second`` is of one server with ``streams``."""

    requests_per_second: float
    prompt_tokens: int
    answer_tokens: int
    tokens_per_second: float
    streams: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """Bytes of one server, and how many servers."""

    kv_tokens: int
    weights: int
    kv: int
    shm: int
    memory: int
    needed_tokens_per_second: float
    servers: int
    seconds_per_answer: float
    open_requests: float


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, element_bytes: int = 2) -> int:
    """Keys and values of all layers; int8 adds one scale per position and head."""
    return 2 * layers * kv_heads * head_dim * element_bytes


def memory_limit(model: Model, kv_tokens: int, shm: int) -> int:
    """Bytes that the container of one server needs."""
    weights = math.ceil(model.weights * WEIGHTS_FACTOR)
    return weights + model.kv_per_token * kv_tokens + PROCESS + OTHERS + shm


def size(model: Model, load: Load, max_model_len: int, shm: int) -> Sizing:
    """Servers by Little's law: each holds at most ``load.streams`` requests at a time.

    Raises:
        ValueError: a figure is not above 0, or requests are longer than the context.
    """
    for name in ("requests_per_second", "answer_tokens", "tokens_per_second", "streams"):
        if getattr(load, name) <= 0:
            raise ValueError(f"{name}: got {getattr(load, name)}; must be above 0")
    length = load.prompt_tokens + load.answer_tokens
    if length > max_model_len:
        raise ValueError(
            f"prompt and answer have {length} tokens; max_model_len is {max_model_len}: raise it"
        )
    # Every open request at its mean length, and as much again for prefixes that stay cached; at
    # least one request of full length, or it could never run.
    tokens = max(2 * load.streams * length, max_model_len)
    kv_tokens = -(-tokens // BLOCK) * BLOCK
    needed = load.requests_per_second * load.answer_tokens
    seconds = load.answer_tokens * load.streams / load.tokens_per_second
    return Sizing(
        kv_tokens=kv_tokens,
        weights=math.ceil(model.weights * WEIGHTS_FACTOR),
        kv=model.kv_per_token * kv_tokens,
        shm=shm,
        memory=memory_limit(model, kv_tokens, shm),
        needed_tokens_per_second=needed,
        servers=math.ceil(needed / (load.tokens_per_second * UTILISATION)),
        seconds_per_answer=seconds,
        open_requests=load.requests_per_second * seconds,
    )


def table(model: Model, load: Load, max_model_len: int, shm: int) -> str:
    """The worksheet, filled in."""
    found = size(model, load, max_model_len, shm)
    length = f"({load.prompt_tokens} + {load.answer_tokens})"
    pool = f"{found.kv_tokens} tokens x {model.kv_per_token} bytes"
    rows = [
        ("Weights", "file x 1.15", _gib(found.weights)),
        (
            "KV pool",
            f"2 x {load.streams} requests x {length} tokens, at least {max_model_len} = {pool}",
            _gib(found.kv),
        ),
        ("Process", "as `pocketllm inspect`", _gib(PROCESS)),
        ("Triton and the other processes", "", _gib(OTHERS)),
        ("`shmSize`", "all of it may be used", _gib(found.shm)),
        ("**Memory limit of a server**", "sum", f"**{_gib(found.memory)}**"),
        (
            "Tokens needed",
            f"{load.requests_per_second:g} requests/s x {load.answer_tokens} tokens",
            f"{found.needed_tokens_per_second:g} tokens/s",
        ),
        (
            "**Servers**",
            f"over {load.tokens_per_second:g} tokens/s x {UTILISATION:g}, rounded up",
            f"**{found.servers}**",
        ),
        (
            "An answer takes",
            f"{load.answer_tokens} tokens at {load.tokens_per_second:g} / {load.streams} tokens/s",
            f"{found.seconds_per_answer:.0f} s",
        ),
        (
            "Open requests",
            "requests/s x seconds (Little's law)",
            f"{found.open_requests:.0f}, of {found.servers * load.streams} places",
        ),
    ]
    return "\n".join(
        ["| What | How | Example |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    )


EXAMPLE = (
    Model("Qwen2.5-7B-Instruct, Q4_0", 4_430_000_000, kv_bytes_per_token(28, 4, 128)),
    Load(
        requests_per_second=1.0,
        prompt_tokens=1200,
        answer_tokens=250,
        tokens_per_second=160.0,
        streams=16,
    ),
    8192,
    512 * MIB,
)
"""An assumed load and an assumed rate; the shape is the model's."""


def render(page: str) -> str:
    """``page`` with a current example."""
    pattern = re.compile(r"<!-- sizing: begin -->.*<!-- sizing: end -->", re.DOTALL)
    text = f"<!-- sizing: begin -->\n{table(*EXAMPLE)}\n<!-- sizing: end -->"
    page, count = pattern.subn(lambda _: text, page)
    if count != 1:
        raise SystemExit(f"{PAGE.name}: one section <!-- sizing --> is needed, found {count}")
    return page


def describe(path: str | None, kv_cache_dtype: str) -> tuple[Model, int]:
    """The model and its own context length, from its headers.

    Raises:
        SystemExit: the files do not say enough.
    """
    from pocket_backend.api import EngineArgs
    from pocket_backend.cli.inspect import judge, memory_need
    from pocket_backend.cli.options import model_path
    from pocket_backend.executors.model_description import describe_model

    args = EngineArgs(model=model_path(path), kv_cache_dtype=kv_cache_dtype)
    model = describe_model(args.model)
    need = memory_need(model, judge(args), args, None, 1)
    if need.weights is None or need.kv_per_token is None or need.context is None:
        raise SystemExit(f"{args.model}: its files do not say enough")
    return Model(Path(args.model).name, need.weights, need.kv_per_token), need.context


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and number of servers.")
    parser.add_argument("model", nargs="?", help="default: the installed demo model")
    parser.add_argument("--docs", action="store_true", help="write docs/deploy.md's example")
    parser.add_argument("--max-model-len", "-c", type=int, help="default: the model's")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--shm-mib", type=int, default=512)
    parser.add_argument("--requests-per-second", type=float, default=1.0)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--tokens-per-second", type=float, default=100.0)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    if options.docs:
        PAGE.write_text(render(PAGE.read_text()))
        return
    model, context = describe(options.model, options.kv_cache_dtype)
    load = Load(
        options.requests_per_second,
        options.prompt_tokens,
        options.answer_tokens,
        options.tokens_per_second,
        options.streams,
    )
    print(f"{model.name}\n")
    try:
        print(table(model, load, options.max_model_len or context, options.shm_mib * MIB))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / MIB:.0f} MiB"


if __name__ == "__main__":
    main()
