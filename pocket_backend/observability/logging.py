"""Structured logs: one event per line, as JSON or ``key=value``, with the request id where known.

Library code calls ``get_logger`` and ``log_event`` and never touches handlers; a process's entry
point calls ``configure_logging`` once. Prompts and outputs are not logged unless the operator asks
(``POCKETLLM_LOG_PROMPTS=1``): fields that would hold them are redacted here, whatever is passed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import IO, Literal

ROOT = "pocketllm"
_REDACTED = frozenset(
    {"prompt", "messages", "text", "text_input", "text_output", "token_ids", "prompt_token_ids"}
)
logging.getLogger(ROOT).addHandler(logging.NullHandler())  # a library is silent until configured
_MAX_VALUE = 512
"""Longest value written; a client chooses request ids and metadata."""
_PROMPTS_VARIABLE = "POCKETLLM_LOG_PROMPTS"
_log_prompts = False


def get_logger(name: str) -> logging.Logger:
    """The logger ``pocketllm.<name>``."""
    return logging.getLogger(f"{ROOT}.{name}")


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    *,
    exc_info: BaseException | None = None,
    **fields: object,
) -> None:
    """Log ``event`` (a short constant phrase) with ``fields``; costs little if not kept."""
    if logger.isEnabledFor(level):
        logger.log(level, event, exc_info=exc_info, extra={"pocket_fields": fields})


def configure_logging(
    level: str | int | None = None,
    style: Literal["json", "text"] | None = None,
    stream: IO[str] | None = None,
    *,
    prompts: bool | None = None,
) -> None:
    """Send ``pocketllm.*`` to ``stream`` (stderr). Calling again replaces the earlier set-up.

    Unset arguments come from ``POCKETLLM_LOG_LEVEL`` (INFO), ``POCKETLLM_LOG_FORMAT`` (text) and
    ``POCKETLLM_LOG_PROMPTS`` (0); with the last, prompts are written, cut to 512 characters.
    """
    global _log_prompts
    asked = os.environ.get(_PROMPTS_VARIABLE, "0").lower() in ("1", "true", "yes", "on")
    _log_prompts = asked if prompts is None else prompts
    chosen = style or os.environ.get("POCKETLLM_LOG_FORMAT", "text")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if chosen == "json" else KeyValueFormatter())
    root = logging.getLogger(ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level if level is not None else os.environ.get("POCKETLLM_LOG_LEVEL", "INFO"))
    root.propagate = False


def reset_logging() -> None:
    """Undo ``configure_logging``: the library is silent, the program around it decides."""
    global _log_prompts
    _log_prompts = False
    root = logging.getLogger(ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(logging.NullHandler())
    root.setLevel(logging.NOTSET)
    root.propagate = True


def prompts_are_logged() -> bool:
    """Whether the operator asked for prompts in the logs."""
    return _log_prompts


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``event``, ..."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class KeyValueFormatter(logging.Formatter):
    """``<time> <LEVEL> <logger> <event> key=value ...`` for people."""

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{_timestamp(record)} {record.levelname} {record.name} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _timestamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: Mapping[str, object] = getattr(record, "pocket_fields", {})
    return {
        key: "[redacted]" if key in _REDACTED and not _log_prompts else _bounded(value)
        for key, value in fields.items()
        if value is not None
    }


def _bounded(value: object) -> object:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _plain(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text)
