"""From what a client sent to one validated request, and to the JSON that travels between models.

Used twice: by the tokenizer model, and again at the generator's edge, which is public too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from pocket_backend.api.errors import InvalidRequestError, UnsupportedFeatureError, short_repr
from pocket_backend.api.sampling_params import SamplingParams
from pocket_backend.triton.fields import (
    BY_NAME,
    IGNORED_PARAMETERS,
    REFUSED,
    TRACE_PARAMETERS,
    Field,
)

_INT32 = 2**31
_JSON_DEPTH = 32
_FIELDS_OF_IDS = (
    "input_ids", "end_id", "stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue: exactly one of ``text``, ``messages`` and ``token_ids`` is set."""

    text: str | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, object], ...] | None = None
    template_kwargs: Mapping[str, object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class Parameters:
    """How to continue it."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    priority: int = 0
    deadline_seconds: float | None = None
    cache_salt: str = ""
    timings: bool = False
    """Whether the last response of an output says how long things took."""

    def to_json(self) -> str:
        """The canonical form, which ``parse_parameters`` reads back."""
        values: dict[str, object] = {}
        default = SamplingParams()
        for item in fields(SamplingParams):
            value = getattr(self.sampling, item.name)
            if value != getattr(default, item.name):
                values[item.name] = dict(value) if isinstance(value, Mapping) else value
        values["stream"] = self.stream
        if self.priority:
            values["priority"] = self.priority
        if self.deadline_seconds is not None:
            values["timeout_ms"] = round(self.deadline_seconds * 1000)
        if self.cache_salt:
            values["cache_salt"] = self.cache_salt
        if self.timings:
            values["return_timings"] = True
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


class _Collected:
    """Values by canonical name, each with the name that the client used for it."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.names: dict[str, str] = {}

    def add(self, name: str, value: object) -> None:
        if value is None:  # an explicit null is as good as absent
            return
        found = _field(name)
        if found.name == "sampling_parameters":
            self._add_object(name, _parse_json(name, value, found.max_chars))
            return
        converted = _convert(found, name, value)
        if found.only and converted not in found.only:
            raise UnsupportedFeatureError(
                name, f"got {short_repr(value)}; leave it out or send {found.range}", field=name
            )
        if found.name in self.values and self.values[found.name] != converted:
            raise InvalidRequestError(
                f"{name}: given twice with different values (also as {self.names[found.name]})",
                field=name,
            )
        self.values[found.name] = converted
        self.names[found.name] = name

    def _add_object(self, name: str, value: object) -> None:
        if not isinstance(value, dict):
            raise InvalidRequestError.of(name, value, "must be a JSON object")
        for key, item in value.items():
            if key in BY_NAME and BY_NAME[key].role == "prompt":
                raise InvalidRequestError(f"{name}: must not hold the prompt ({key})", field=name)
            self.add(key, item)


def parse_request(
    tensors: Mapping[str, object],
    parameters: Mapping[str, object],
    *,
    vocab_size: int | None = None,
) -> tuple[Prompt, Parameters]:
    """Validate what a client sent to the ensemble.

    Args:
        tensors: by name; one-element tensors of scalar fields are already scalars (``codec.py``).
        parameters: request parameters by name.
        vocab_size: token ids from there on are refused; None leaves that to the engine.

    Raises:
        InvalidRequestError: names the field (as the client wrote it), the value and the remedy.
        UnsupportedFeatureError: a known field or value that this version cannot honour.
    """
    collected = _collect(tensors, parameters)
    if vocab_size is not None:
        _check_vocabulary(collected, vocab_size)
    return _prompt(collected), _parameters(collected)


def parse_parameters(tensors: Mapping[str, object], parameters: Mapping[str, object]) -> Parameters:
    """As ``parse_request``, for a request whose prompt came as ids already."""
    collected = _collect(tensors, parameters)
    for name in collected.values:
        if BY_NAME[name].role == "prompt":
            raise InvalidRequestError(
                f"{collected.names[name]}: the generator takes its prompt as the input_ids tensor",
                field=name,
            )
    return _parameters(collected)


def _collect(tensors: Mapping[str, object], parameters: Mapping[str, object]) -> _Collected:
    collected = _Collected()
    for name, value in tensors.items():
        collected.add(name, value)
    for name, value in parameters.items():
        if not _is_ignored(name):
            collected.add(name, _list_of_strings(name, value))
    return collected


def _list_of_strings(name: str, value: object) -> object:
    """A request parameter cannot be a list, so a JSON list of strings is one; else as it is."""
    found = BY_NAME.get(name)
    if found is None or found.kind != "strings" or not isinstance(value, str):
        return value
    if not value.startswith("["):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if all(isinstance(item, str) for item in parsed) else value


def _check_vocabulary(collected: _Collected, size: int) -> None:
    """Refuse foreign ids here, where the name that the client used is still known."""
    for field_name in _FIELDS_OF_IDS:
        value = collected.values.get(field_name)
        if value is None:
            continue
        ids = _logit_bias(value) if field_name == "logit_bias" else value
        for token in (ids,) if isinstance(ids, int) else ids:  # type: ignore[attr-defined]
            if token >= size:
                name = collected.names[field_name]
                raise InvalidRequestError.of(
                    name, token, f"token ids are integers from 0 to {size - 1}"
                )


def _is_ignored(parameter: str) -> bool:
    return (
        parameter in IGNORED_PARAMETERS
        or parameter.startswith("triton_")
        or parameter.lower() in TRACE_PARAMETERS
    )


def _field(name: str) -> Field:
    found = BY_NAME.get(name)
    if found is not None:
        return found
    if name in REFUSED:
        raise UnsupportedFeatureError(name, REFUSED[name], field=name)
    shown = name if len(name) <= 64 else f"{name[:64]}..."
    raise InvalidRequestError(
        f"{shown}: unknown field; see docs/triton.md for the fields that exist", field=shown
    )


def _prompt(collected: _Collected) -> Prompt:
    values = collected.values
    given = [name for name in ("text_input", "messages", "input_ids") if name in values]
    if len(given) != 1:
        what = f"got {' and '.join(given)}" if given else "got none"
        raise InvalidRequestError(
            f"text_input: {what}; send exactly one of text_input, messages and input_ids",
            field="text_input",
        )
    if not values[given[0]]:
        raise InvalidRequestError(f"{given[0]}: must not be empty", field=given[0])
    if given[0] != "messages":
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt",
                     "continue_final_message"):  # fmt: skip
            if name in values:
                raise InvalidRequestError(f"{name}: only goes with messages", field=name)
    messages = values.get("messages")
    tools = values.get("tools")
    kwargs = values.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidRequestError.of("chat_template_kwargs", kwargs, "must be a JSON object")
    continues = bool(values.get("continue_final_message", False))
    return Prompt(
        text=values.get("text_input"),  # type: ignore[arg-type]
        messages=None if messages is None else _objects("messages", messages),
        token_ids=values.get("input_ids"),  # type: ignore[arg-type]
        tools=None if tools is None else _objects("tools", tools),
        template_kwargs=kwargs,
        add_generation_prompt=bool(values.get("add_generation_prompt", not continues)),
        continue_final_message=continues,
    )


def _objects(name: str, value: object) -> tuple[Mapping[str, object], ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidRequestError(f"{name}: must be a JSON list of objects", field=name)
    return tuple(value)


def _parameters(collected: _Collected) -> Parameters:
    values = dict(collected.values)
    sampling = {
        item.name: values[item.name] for item in fields(SamplingParams) if item.name in values
    }
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _logit_bias(sampling["logit_bias"])
    if "end_id" in values:
        ids = sampling.get("stop_token_ids", ())
        assert isinstance(ids, tuple)
        sampling["stop_token_ids"] = (*ids, values["end_id"])
    if values.get("return_logprobs") or values.get("return_cumulative_logprob"):
        sampling.setdefault("logprobs", 0)
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    timeout_ms = values.get("timeout_ms")
    try:
        return Parameters(
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            stream=bool(values.get("stream", False)),
            priority=values.get("priority", 0),  # type: ignore[arg-type]
            deadline_seconds=None if timeout_ms is None else timeout_ms / 1000,  # type: ignore[operator]
            cache_salt=values.get("cache_salt", ""),  # type: ignore[arg-type]
            timings=bool(values.get("return_timings", False)),
        )
    except InvalidRequestError as error:
        used = collected.names.get(error.field or "", error.field)
        if used is None or used == error.field:
            raise
        message = str(error).removeprefix(str(error.field))
        raise InvalidRequestError(f"{used}{message}", field=used) from None


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise InvalidRequestError.of("logit_bias", value, "must be a JSON object")
    bias = {}
    for key, amount in value.items():
        if not (isinstance(key, str) and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError.of("logit_bias", key, "keys must be token ids")
        bias[int(key)] = amount
    return bias


# --- one value ------------------------------------------------------------------------------------


def _convert(found: Field, name: str, value: object) -> object:
    """``value`` as the field's kind; strings are accepted for JSON and for lists."""
    if found.kind == "json":
        return _parse_json(name, value, found.max_chars)
    if found.kind == "string":
        return _string(found, name, value)
    if found.kind == "bool":
        if not isinstance(value, bool):
            raise InvalidRequestError.of(name, value, "must be true or false")
        return value
    if found.kind == "int":
        return _integer(found, name, value)
    if found.kind == "float":
        return _number(name, value)
    if found.kind == "strings":
        return _strings(found, name, value)
    return _integers(found, name, value)


def _string(found: Field, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError.of(name, value, "must be a string")
    if found.max_chars and len(value) > found.max_chars:
        raise InvalidRequestError(
            f"{name}: {len(value)} characters long; at most {found.max_chars} are allowed",
            field=name,
        )
    return value


def _integer(found: Field, name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError.of(name, value, "must be an integer")
    low = -_INT32 if found.minimum is None else int(found.minimum)
    high = _INT32 - 1 if found.maximum is None else int(found.maximum)
    if found.name != "seed" and not low <= value <= high:
        raise InvalidRequestError.of(name, value, f"must be an integer from {low} to {high}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError.of(name, value, "must be a finite number")
    return float(value)


def _strings(found: Field, name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise InvalidRequestError.of(name, value, "must be a list of strings")
    if name in ("stop_words", "bad_words"):  # their clients send [""] for none
        items = [item for item in items if item != ""]
    _check_count(found, name, items)
    for item in items:
        if not isinstance(item, str):
            raise InvalidRequestError.of(name, item, "each must be a string")
    return tuple(items)


def _integers(found: Field, name: str, value: object) -> tuple[int, ...]:
    items = _parse_json(name, value, 1 << 16) if isinstance(value, str) else value
    if isinstance(items, int) and not isinstance(items, bool):
        items = [items]
    if not isinstance(items, list | tuple):
        raise InvalidRequestError.of(name, items, "must be a list of token ids")
    _check_count(found, name, items)
    if not all(type(item) is int and 0 <= item < _INT32 for item in items):
        bad = next(item for item in items if type(item) is not int or not 0 <= item < _INT32)
        raise InvalidRequestError.of(name, bad, "each must be a token id, an integer from 0")
    return tuple(items)


def _check_count(found: Field, name: str, items: list[object] | tuple[object, ...]) -> None:
    if found.max_items and len(items) > found.max_items:
        raise InvalidRequestError(
            f"{name}: {len(items)} items; at most {found.max_items} are allowed", field=name
        )


def _parse_json(name: str, value: object, max_chars: int) -> object:
    """A JSON value, given as text or already parsed (inside ``sampling_parameters``)."""
    if not isinstance(value, str):
        return value
    if max_chars and len(value) > max_chars:
        raise InvalidRequestError(
            f"{name}: {len(value)} characters of JSON; at most {max_chars} are allowed", field=name
        )
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        detail = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequestError(f"{name}: not valid JSON: {detail[:200]}", field=name) from None
    if _depth(parsed) > _JSON_DEPTH:
        raise InvalidRequestError(f"{name}: nested deeper than {_JSON_DEPTH} levels", field=name)
    return parsed


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _depth(value: object) -> int:
    """Nesting of lists and objects, without recursion."""
    depth, level = 0, [value]
    while level:
        below: list[object] = []
        for item in level:
            below.extend(_children(item))
        if not any(isinstance(item, dict | list) for item in level):
            return depth
        depth, level = depth + 1, below
    return depth


def _children(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()
