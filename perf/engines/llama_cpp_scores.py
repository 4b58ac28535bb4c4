"""Teacher-forced scores of llama.cpp; runs in its environment for ``perf.quality``.

One JSON object on stdin (``model``, ``texts``: lists of token ids), one on stdout (``logprobs``,
``choices``: per predicted position).
"""

from __future__ import annotations

import json
import sys

import numpy as np
from llama_cpp import Llama


def main() -> None:
    task = json.load(sys.stdin)
    longest = max(map(len, task["texts"]))
    model = Llama(
        task["model"], n_ctx=longest, n_batch=longest, n_threads=2, logits_all=True, verbose=False
    )
    logprobs: list[float] = []
    choices: list[int] = []
    for text in task["texts"]:
        model.reset()
        model.eval(text)
        rows = np.array(model.scores[: len(text) - 1], dtype=np.float64)
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        logprobs += (rows[np.arange(len(rows)), text[1:]] - total).tolist()
        choices += rows.argmax(axis=1).tolist()
    print(json.dumps({"logprobs": logprobs, "choices": choices}))


if __name__ == "__main__":
    main()
