"""Builds a model's runtime so that a failure reads as one sentence in Triton's log."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from pocket_backend.api import PocketLLMError
from pocket_backend.observability.logging import configure_logging, get_logger, log_event

_T = TypeVar("_T")


def load_or_explain(factory: type[_T], pb_utils: Any, args: dict[str, str]) -> _T:
    """``factory(pb_utils, args)``.

    Raises:
        TritonModelException: with the sentence of the PocketLLMError; Triton prints it and gives it
            to whoever asked for the load.
    """
    try:
        return factory(pb_utils, args)  # type: ignore[call-arg]
    except PocketLLMError as error:
        configure_logging()
        log_event(
            get_logger("triton"), logging.ERROR, "model not loaded",
            model=args.get("model_name"), reason=str(error),
        )  # fmt: skip
        raise pb_utils.TritonModelException(str(error)) from None
