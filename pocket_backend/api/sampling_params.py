"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields
from types import MappingProxyType
from typing import Self

from pocket_backend.api.errors import InvalidRequestError, UnsupportedFeatureError
from pocket_backend.api.openai_params import check_response_format, openai_fields

GREEDY_EPSILON = 1e-5
"""Temperatures up to this are greedy: dividing logits by less overflows float32."""

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_TOKEN_IDS = 1024
MAX_BAD_WORDS = 32
MAX_BAD_WORD_LENGTH = 128
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_LOGPROBS = 20
MAX_N = 128
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Immutable and validated on construction; names follow vLLM and the OpenAI API.

    Raises:
        InvalidRequestError: a field has the wrong type or lies outside its range; the message names
            the field, the value and the allowed range.
    """

    max_tokens: int | None = None
    """At most this many new tokens; None: until the context is full."""
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 (or -1, as vLLM writes it): off."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    bad_token_ids: tuple[int, ...] = ()
    """Ids that are never sampled."""
    bad_words: tuple[str, ...] = ()
    """Strings that the output's text never holds, however they would be tokenized."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only ids that may be sampled; None: all."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    """Number of alternatives to report per token (0: the chosen token only); None: off."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. Such a request computes its whole prompt: it finds nothing
    in the prefix cache and shares nothing through it."""
    top_logprobs: InitVar[int | None] = None
    """The older API's (and OpenAI's) name: sets ``logprobs``."""
    response_format: InitVar[Mapping[str, object] | None] = None
    """None or ``{"type": "text"}``."""
    extra: InitVar[Mapping[str, object] | None] = None
    """Options of other backends, which no backend of this version has: must be empty."""

    def __post_init__(
        self,
        top_logprobs: int | None,
        response_format: Mapping[str, object] | None,
        extra: Mapping[str, object] | None,
    ) -> None:
        if isinstance(self.logprobs, bool):
            object.__setattr__(self, "logprobs", 0 if self.logprobs else None)
        if top_logprobs is not None:
            _check_int("top_logprobs", top_logprobs, 0, MAX_LOGPROBS)
            object.__setattr__(self, "logprobs", top_logprobs)
        check_response_format(response_format)
        for name in extra or ():
            raise UnsupportedFeatureError(f"extra[{name!r}]", "no such option", field=name)
        for name in ("stop", "bad_words"):
            given = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(self, name, (given,))
            elif isinstance(given, list):
                object.__setattr__(self, name, tuple(given))
        for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError.of(
                "min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})"
            )
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, _INT32_MAX)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError.of(name, getattr(self, name), "must be true or false")
        _check_int("n", self.n, 1, MAX_N)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    @classmethod
    def from_openai(cls, body: Mapping[str, object]) -> Self:
        """From the fields of an OpenAI request; absent and null ones keep our defaults.

        Raises:
            InvalidRequestError, UnsupportedFeatureError: as the constructor.
        """
        return cls(**openai_fields(body))

    def to_generation_options(self) -> dict[str, object]:
        """The fields that differ from their defaults."""
        plain = SamplingParams()
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if getattr(self, item.name) != getattr(plain, item.name)
        }

    def _check_lists(self) -> None:
        _check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _check_ids("bad_token_ids", self.bad_token_ids, MAX_BAD_TOKEN_IDS)
        allowed = self.allowed_token_ids
        if allowed is not None:
            _check_ids("allowed_token_ids", allowed, MAX_ALLOWED_TOKEN_IDS)
            if not set(allowed).difference(self.bad_token_ids):
                raise InvalidRequestError.of(
                    "allowed_token_ids", allowed, "must name a token that bad_token_ids does not"
                )
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError.of(
                "logit_bias", bias, f"must map at most {MAX_LOGIT_BIAS} token ids to numbers"
            )
        for token, value in bias.items():
            _check_int("logit_bias", token, 0, _INT32_MAX)
            _check_float("logit_bias", value, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(bias)))

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_EPSILON

    def token_budget(self, prompt_tokens: int, context: int) -> int:
        """How many tokens may be generated after ``prompt_tokens`` in a context of ``context``."""
        room = context - prompt_tokens
        return room if self.max_tokens is None else min(self.max_tokens, room)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def needs_known_tokens(self) -> bool:
        """Whether an executor has to know tokens beyond those that it computes."""
        return self.prompt_logprobs is not None or self.has_penalties

    def required_features(self) -> frozenset[str]:
        """Executor features that these parameters need (``BackendExecutor.supports_feature``)."""
        needs = {
            "min_p": self.min_p > 0.0,
            "min_tokens": self.min_tokens > 0,
            "penalties": self.has_penalties,
            "logit_bias": bool(self.logit_bias),
            "token_masks": bool(self.bad_token_ids) or self.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            "logprobs": self.logprobs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "n": self.n > 1,
        }
        return frozenset(name for name, needed in needs.items() if needed)


def _check_strings(name: str, texts: object, limit: int, length: int) -> None:
    if not isinstance(texts, tuple) or len(texts) > limit:
        raise InvalidRequestError.of(name, texts, f"must be a list of at most {limit} strings")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= length:
            raise InvalidRequestError.of(
                name, text, f"each must be a string of 1 to {length} characters"
            )


def _check_ids(name: str, ids: object, limit: int) -> None:
    if not isinstance(ids, tuple) or len(ids) > limit:
        raise InvalidRequestError.of(name, ids, f"must be a list of at most {limit} token ids")
    for token in ids:
        _check_int(name, token, 0, _INT32_MAX)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError.of(name, value, f"must be an integer from {low} to {high}")


def _check_float(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= float(value) <= high or (open_low and float(value) == low):  # type: ignore[arg-type]
        edge = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidRequestError.of(name, value, f"must be a finite number {edge}")
