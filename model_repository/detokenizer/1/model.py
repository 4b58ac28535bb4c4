"""Triton's entry point of the `detokenizer` model; see pocket_backend.triton.detokenizer."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from pocket_backend.triton.detokenizer import DetokenizerModel
from pocket_backend.triton.startup import load_or_explain


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = load_or_explain(DetokenizerModel, pb_utils, args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return self._model.execute(requests)

    def finalize(self) -> None:
        self._model.close()
