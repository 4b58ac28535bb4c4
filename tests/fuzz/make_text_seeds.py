"""Writes the seed corpora of the JSON and safetensors fuzzers. Run from the repository root:

    python tests/fuzz/make_text_seeds.py

The files are committed. Deterministic.
"""

import json
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")

JSON_TEXTS = {
    "values": '{"i": -12, "d": 2.5e1, "big": 99999999999999999999, "t": true, "n": null}',
    "strings": '["", "x\\n\\t\\\\\\"", "\\u00e9\\ud83d\\ude00\\ud83d", "caf\u00e9"]',
    "nested": "[" * 60 + "]" * 60,
    "too_deep": "[" * 70 + "]" * 70,
    "merges": '{"model": {"merges": [["a]", "b\\"}"], {"x": 1}], "vocab": {"a": 0, "b": 1}}}',
    "python": "[NaN, Infinity, -Infinity, 0, -0, 1E-7]",
    "repeated": '{"a": 1, "a": 2}',
    "cut": '{"weight_map": {"a": "model-00001',
}

INDICES = {
    "two_shards": {
        "metadata": {"total_size": 24},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002"},
    },
    "outside": {"weight_map": {"a": "../secret", "b": ".."}},
    "no_map": {"metadata": {}},
    "not_text": {"weight_map": {"a": 3}},
    "empty": {"weight_map": {}},
}


def safetensors(header: str, data: int, *, claims: int | None = None) -> bytes:
    text = header.encode()
    size = len(text) if claims is None else claims
    return size.to_bytes(8, "little") + text + bytes(range(data))


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def main() -> None:
    two = {
        "__metadata__": {"format": "pt"},
        "w": entry("BF16", [2, 3], 16, 28),
        "b": entry("F32", [4], 0, 16),
        "e": entry("F16", [0, 7], 28, 28),
    }
    text = json.dumps(two)
    whole = safetensors(text, 28)
    tensors = {
        "two": whole,
        "padded": safetensors(text + " " * 5, 28),
        "truncated": whole[:-5],
        "gap": safetensors(json.dumps({"a": entry("F32", [1], 4, 8)}), 8),
        "overlap": safetensors(
            json.dumps({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}), 12
        ),
        "overflow": safetensors(json.dumps({"a": entry("F32", [1 << 62, 4], 0, 16)}), 16),
        "huge_header": safetensors(text, 28, claims=1 << 60),
        "no_tensors": safetensors("{}", 0),
    }
    files = {("safetensors", name): data for name, data in tensors.items()}
    files |= {("json", name): value.encode() for name, value in JSON_TEXTS.items()}
    files |= {
        ("safetensors_index", name): json.dumps(value).encode() for name, value in INDICES.items()
    }
    for (folder, name), data in files.items():
        path = CORPUS / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
