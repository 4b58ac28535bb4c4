"""Triton's entry point of the `tokenizer` model; see pocket_backend.triton.tokenizer."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from pocket_backend.triton.startup import load_or_explain
from pocket_backend.triton.tokenizer import TokenizerModel


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = load_or_explain(TokenizerModel, pb_utils, args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)
