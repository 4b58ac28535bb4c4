"""``python -m perf.quality``: what quantised arithmetic costs in quality, beside llama.cpp.

Every engine reads the same windows of text, teacher-forced, from the same GGUF; by default the
project's LICENSE and documentation. Reported per engine: perplexity; how often its likeliest next
token is that of the exact float path (which the parity tests hold against Transformers in float32);
and, against llama.cpp, at how many positions only one of the two agrees with the exact path, with
the two-sided sign test's p: above 0.05 the two cannot be told apart. Deterministic; nothing is
timed, so the machine may be busy.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf.engines.environments import CACHE, ROOT
from perf.records import Record, text_table, write_records
from perf.run_options import model_path
from pocket_backend.text import load_tokenizer

BENCH = "quality"
WINDOW = 512
"""Tokens per window; every window starts with an empty context."""
OURS = (
    ("pocketllm, exact f32", {"precision": "f32", "kv_dtype": "f32"}),
    ("pocketllm, int8, f32 KV", {"precision": "int8", "kv_dtype": "f32"}),
    ("pocketllm, int8, f16 KV", {"precision": "int8", "kv_dtype": "f16"}),
    ("pocketllm, int8, bf16 KV", {"precision": "int8", "kv_dtype": "bf16"}),
    ("pocketllm, int8, int8 KV", {"precision": "int8", "kv_dtype": "i8"}),
)


@dataclass(frozen=True, slots=True)
class Scores:
    """Per predicted position: the reference token's log-probability, and the likeliest token."""

    logprobs: np.ndarray
    choices: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, targets: Sequence[int]) -> Scores:
        """``logits`` [n, vocab] predict ``targets`` [n]."""
        rows = logits.astype(np.float64)
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        return cls(rows[np.arange(len(targets)), list(targets)] - total, rows.argmax(axis=1))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        return cls(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.choices for part in parts]),
        )

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprobs.mean()))

    def agreement(self, other: Scores) -> float:
        """Share of positions where both prefer the same token."""
        return float((self.choices == other.choices).mean())


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p of so uneven a split if both sides were equally likely (binomial, exact)."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(max(wins, losses), n + 1))
    return min(1.0, 2 * tail / 2**n)


def windows(tokens: Sequence[int], size: int, count: int) -> list[list[int]]:
    """The first ``count`` whole windows of ``size`` tokens; all that there are if it is 0.

    Raises:
        ValueError: the text is too short.
    """
    count = count or max(1, len(tokens) // size)
    if len(tokens) < size * count:
        raise ValueError(f"the text has {len(tokens)} tokens; {count} x {size} are needed")
    return [list(tokens[i * size : (i + 1) * size]) for i in range(count)]


def against(score: Scores, peer: Scores, exact: Scores) -> str:
    """Positions where only one of the two prefers the exact path's token, and the sign test."""
    ours = score.choices == exact.choices
    theirs = peer.choices == exact.choices
    wins, losses = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    return f"{wins} : {losses} (p = {sign_test(wins, losses):.2g})"


def score_ours(model: Path, texts: Sequence[Sequence[int]], options: dict[str, str]) -> Scores:
    import pocket_cpp_core

    blocks = WINDOW // 16
    engine = pocket_cpp_core.Engine(
        str(model), num_blocks=blocks, max_sequences=1, max_batch_tokens=WINDOW, **options
    )
    vocab = engine.model_info["vocab"]
    table = np.arange(blocks, dtype=np.int32).reshape(1, blocks)
    parts = []
    for text in texts:
        logits = engine.logits(
            token_ids=np.array(text, dtype=np.int32),
            positions=np.arange(len(text), dtype=np.int32),
            sequence_offsets=np.array([0, len(text)], dtype=np.int32),
            block_tables=table,
            table_rows=np.zeros(1, dtype=np.int32),
            logits_rows=np.arange(len(text) - 1, dtype=np.int32),
        )
        parts.append(Scores.of(logits[:, :vocab], text[1:]))
    return Scores.joined(parts)


def score_llama_cpp(model: Path, texts: Sequence[Sequence[int]]) -> Scores:
    """In llama.cpp's own environment, as ``perf.compare`` made it."""
    python = CACHE / "llama.cpp" / "venv" / "bin" / "python"
    task = json.dumps({"model": str(model), "texts": [list(text) for text in texts]})
    done = subprocess.run(
        [str(python), "-m", "perf.engines.llama_cpp_scores"],
        input=task,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"llama.cpp failed: {done.stderr.strip()[-500:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Scores(np.array(answer["logprobs"]), np.array(answer["choices"]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.quality", description=__doc__)
    parser.add_argument("--model", help="a GGUF file; default: the demo model's package")
    parser.add_argument("--text", nargs="+", type=Path, help="UTF-8 files to read instead")
    parser.add_argument("--windows", type=int, default=0, help="of 512 tokens; default: all")
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--json", metavar="FILE", help="write the records there")
    args = parser.parse_args(argv)
    model = model_path(args.model)
    files = args.text or [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    tokens = load_tokenizer(str(model)).encode(text, add_special_tokens=False)
    texts = windows(tokens, WINDOW, args.windows)
    scores = {name: score_ours(model, texts, options) for name, options in OURS}
    if not args.no_peer:
        scores["llama.cpp"] = score_llama_cpp(model, texts)
    exact = scores[OURS[0][0]]
    peer = scores.get("llama.cpp")
    records = []
    rows = []
    for name, score in scores.items():
        agreement = score.agreement(exact)
        rows.append(
            [
                name,
                f"{score.perplexity:.3f}",
                f"{100 * agreement:.2f} %",
                ""
                if peer is None or score is peer or score is exact
                else against(score, peer, exact),
            ]
        )
        for metric, value in (("perplexity", score.perplexity), ("top1_agreement", agreement)):
            workload = f"{len(texts)} x {WINDOW}"
            records.append(Record.of(BENCH, name, workload, 1, metric, "ratio", [value]))
    print(f"{len(texts)} windows of {WINDOW} tokens")
    heads = ["engine", "perplexity", "likeliest token as exact", "only it : only llama.cpp"]
    print(text_table(heads, rows))
    if args.json:
        write_records(Path(args.json), records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
