"""Every user-level input of the `pocketllm` model, in one table.

The table drives parsing, type and range checks, refusal of what is not supported, the inputs in
``config.pbtxt`` (``repository.py``) and the table in ``docs/triton.md``.  A field can be sent as a
tensor, as a request parameter (a plain JSON key of ``generate``), or inside the JSON object of
``sampling_parameters``.

Names are those of Triton's vLLM backend and of the TensorRT-LLM ensemble where they have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pocket_backend.api.sampling_params import (
    MAX_BAD_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from pocket_backend.text.chat_messages import MAX_CHAT_BYTES, MAX_MESSAGES, MAX_TOOLS
from pocket_backend.text.tokenizer import MAX_PROMPT_BYTES

Kind = Literal["string", "int", "float", "bool", "strings", "ints", "json"]
Role = Literal["prompt", "sampling", "serving", "compatibility"]

MAX_PROMPT_TOKENS = 1 << 20
MAX_TEXT_CHARS = MAX_PROMPT_BYTES
"""Longest ``text_input`` that is looked at; the context decides what fits."""
MAX_MESSAGES_CHARS = 2 * MAX_CHAT_BYTES
"""Of ``messages`` as JSON, where a character may take several."""
MAX_JSON_CHARS = 1 << 20
MAX_TIMEOUT_MS = 24 * 3600 * 1000
MAX_SALT_CHARS = 256
MAX_PRIORITY = 2**31 - 1
MAX_ALLOWED_TOKEN_IDS = 8192
"""Less than ``SamplingParams`` takes: they travel between the models as JSON."""

_TENSOR_TYPES: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        "string": ("TYPE_STRING", "1"),
        "int": ("TYPE_INT32", "1"),
        "float": ("TYPE_FP32", "1"),
        "bool": ("TYPE_BOOL", "1"),
        "strings": ("TYPE_STRING", "-1"),
        "ints": ("TYPE_INT32", "-1"),
        "json": ("TYPE_STRING", "1"),
    }
)


@dataclass(frozen=True, slots=True)
class Field:
    """One input.

    ``role`` says where the value goes: ``prompt``, ``sampling`` (a field of ``SamplingParams``,
    which checks its range), ``serving`` (the request around it) or ``compatibility`` (accepted for
    other backends' clients, with the values named in ``only``).
    """

    name: str
    kind: Kind
    role: Role
    help: str
    default: str = "unset"
    """As documented; the code's defaults are those of ``SamplingParams`` and the parser."""
    range: str = ""
    aliases: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    only: tuple[object, ...] = ()
    """The only values that mean what this version does; any other is refused by name."""
    max_items: int = 0
    max_chars: int = 0
    data_type: str | None = None
    """Tensor type where it is not the usual one of ``kind``."""
    parameter_only: bool = False
    """No tensor of the ensemble: an output has that name, and its tensors share one namespace."""

    @property
    def tensor(self) -> tuple[str, str]:
        """(data type, dims) in ``config.pbtxt``."""
        data_type, dims = _TENSOR_TYPES[self.kind]
        return self.data_type or data_type, dims

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


_PROMPT = (
    Field("text_input", "string", "prompt", "The prompt as text, used as it is.",
          range=f"1 to {MAX_TEXT_CHARS} bytes", max_chars=MAX_TEXT_CHARS),
    Field("messages", "json", "prompt",
          "A conversation, rendered with the model's chat template: JSON list of objects with "
          "`role` and `content`.",
          range=f"1 to {MAX_MESSAGES} messages, {MAX_MESSAGES_CHARS} characters of JSON",
          max_chars=MAX_MESSAGES_CHARS),
    Field("input_ids", "ints", "prompt", "The prompt as token ids.",
          range=f"1 to {MAX_PROMPT_TOKENS} ids of the vocabulary", max_items=MAX_PROMPT_TOKENS),
    Field("tools", "json", "prompt",
          "Tool definitions for the chat template: JSON list of objects.",
          range=f"at most {MAX_TOOLS}, {MAX_JSON_CHARS} characters of JSON",
          max_chars=MAX_JSON_CHARS),
    Field("chat_template_kwargs", "json", "prompt",
          "Further variables for the chat template: JSON object.",
          range=f"at most {MAX_JSON_CHARS} characters of JSON", max_chars=MAX_JSON_CHARS),
    Field("add_generation_prompt", "bool", "prompt",
          "Whether the rendered chat ends with the start of the assistant's turn.",
          default="true, or false with `continue_final_message`"),
    Field("continue_final_message", "bool", "prompt",
          "Leave the last message open, so that the model continues it.", default="false"),
)  # fmt: skip

_SAMPLING = (
    Field("max_tokens", "int", "sampling", "At most this many new tokens.",
          default="what the context has room for", range="1 to 2^31-1"),
    Field("min_tokens", "int", "sampling", "No end of sequence before this many new tokens.",
          default="0", range="0 to max_tokens", aliases=("min_length",)),
    Field("temperature", "float", "sampling", "0 is greedy.", default="0", range="0 to 100"),
    Field("top_k", "int", "sampling", "Sample among the k likeliest; 0 or -1: all.", default="0",
          range="-1 to 2^31-1", aliases=("runtime_top_k",)),
    Field("top_p", "float", "sampling", "Sample among the likeliest that hold this probability.",
          default="1", range="above 0 to 1", aliases=("runtime_top_p",)),
    Field("min_p", "float", "sampling",
          "Drop tokens below this share of the likeliest one's probability.", default="0",
          range="0 to 1"),
    Field("seed", "int", "sampling", "Same seed, same tokens, whatever runs beside.",
          default="random", range="0 to 2^64-1", aliases=("random_seed",), data_type="TYPE_UINT64"),
    Field("repetition_penalty", "float", "sampling", "Above 1 discourages repetition.",
          default="1", range="above 0 to 100"),
    Field("frequency_penalty", "float", "sampling", "Subtracted per earlier use of a token.",
          default="0", range="-100 to 100"),
    Field("presence_penalty", "float", "sampling", "Subtracted once for a token used before.",
          default="0", range="-100 to 100"),
    Field("logit_bias", "json", "sampling", "JSON object: token id to what is added to its logit.",
          range=f"at most {MAX_LOGIT_BIAS} entries of -100 to 100, {MAX_JSON_CHARS} characters",
          max_chars=MAX_JSON_CHARS),
    Field("bad_token_ids", "ints", "sampling", "Token ids that are never sampled.",
          range=f"at most {MAX_BAD_TOKEN_IDS}", max_items=MAX_BAD_TOKEN_IDS),
    Field("allowed_token_ids", "ints", "sampling", "The only token ids that may be sampled.",
          default="all", range=f"1 to {MAX_ALLOWED_TOKEN_IDS}", max_items=MAX_ALLOWED_TOKEN_IDS),
    Field("stop", "strings", "sampling", "Strings that end the output and are cut off.",
          range=f"at most {MAX_STOP_STRINGS} of 1 to {MAX_STOP_LENGTH} characters",
          aliases=("stop_words",),
          max_items=MAX_STOP_STRINGS),
    Field("stop_token_ids", "ints", "sampling", "Token ids that end the output.",
          range=f"at most {MAX_STOP_TOKEN_IDS}", max_items=MAX_STOP_TOKEN_IDS),
    Field("include_stop_str_in_output", "bool", "sampling", "Keep the stop string.",
          default="false"),
    Field("ignore_eos", "bool", "sampling", "Go on after end-of-sequence tokens.", default="false"),
    Field("skip_special_tokens", "bool", "sampling", "Leave special tokens out of the text.",
          default="true"),
    Field("bad_words", "strings", "sampling",
          "Strings that the output never holds, however they would be tokenized.",
          range=f"at most {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_LENGTH} characters",
          max_items=MAX_BAD_WORDS),
    Field("n", "int", "sampling",
          "Number of outputs; each has a random stream of its own, the first that of `n` = 1.",
          default="1", range=f"1 to {MAX_N}", aliases=("num_return_sequences",)),
    Field("logprobs", "int", "sampling",
          "Log probability of each output token, and of this many likeliest alternatives.",
          range=f"0 to {MAX_LOGPROBS}", parameter_only=True),
    Field("prompt_logprobs", "int", "sampling",
          "The same for the prompt's tokens. The whole prompt is computed, whatever is cached.",
          range=f"0 to {MAX_LOGPROBS}", parameter_only=True),
)  # fmt: skip

_SERVING = (
    Field("stream", "bool", "serving",
          "Answer in increments (`generate_stream`, gRPC streaming); false: one response.",
          default="false", aliases=("streaming",)),
    Field("sampling_parameters", "json", "serving",
          "JSON object with any of these fields except prompts.",
          range=f"at most {MAX_JSON_CHARS} characters", max_chars=MAX_JSON_CHARS),
    Field("end_id", "int", "serving", "One more token id that ends the output.",
          range="an id of the vocabulary", minimum=0),
    Field("priority", "int", "serving", "Lower is served first.", default="0",
          range="1-2^31 to 2^31-1", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY),
    Field("timeout_ms", "int", "serving",
          "Milliseconds from arrival, queueing included, after which the request ends with an "
          "error.", range=f"1 to {MAX_TIMEOUT_MS}", minimum=1, maximum=MAX_TIMEOUT_MS),
    Field("cache_salt", "string", "serving",
          "Requests share cached prefixes only with those of the same salt.", default="empty",
          range=f"at most {MAX_SALT_CHARS} characters", max_chars=MAX_SALT_CHARS),
    Field("return_logprobs", "bool", "serving", "As `logprobs` 0 where that is not given.",
          default="false", aliases=("return_log_probs",)),
    Field("return_cumulative_logprob", "bool", "serving",
          "As `logprobs` 0 where that is not given.", default="false"),
    Field("return_timings", "bool", "serving", "Send `timings` with an output's last response.",
          default="false"),
)  # fmt: skip

_ALWAYS_SENT = "This output is always sent; clients choose with the requested outputs."
_COMPATIBILITY = (
    Field("exclude_input_in_output", "bool", "compatibility",
          "The prompt is never part of the output.", default="true", range="true", only=(True,)),
    Field("return_finish_reason", "bool", "compatibility", _ALWAYS_SENT),
    Field("return_num_input_tokens", "bool", "compatibility", _ALWAYS_SENT),
    Field("return_num_output_tokens", "bool", "compatibility", _ALWAYS_SENT),
    Field("beam_width", "int", "compatibility", "Beam search is not supported.", default="1",
          range="1", only=(1,)),
)  # fmt: skip

FIELDS: tuple[Field, ...] = (*_PROMPT, *_SAMPLING, *_SERVING, *_COMPATIBILITY)

BY_NAME: Mapping[str, Field] = MappingProxyType(
    {name: field for field in FIELDS for name in field.names}
)
"""Fields by name and alias."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "best_of": "outputs are not ranked; use n",
        "length_penalty": "it belongs to beam search",
        "len_penalty": "it belongs to beam search",
        "early_stopping": "it belongs to beam search",
        "use_beam_search": "beam search is not supported",
        "beam_search_diversity_rate": "beam search is not supported",
        "lora_name": "adapters are not supported in this version",
        "lora_task_id": "adapters are not supported in this version",
        "guided_decoding": "structured output is not supported in this version",
        "guided_json": "structured output is not supported in this version",
        "response_format": "structured output is not supported in this version",
        "image": "images are not supported",
        "embedding_request": "embeddings are not supported",
        "return_context_logits": "logits are not returned",
        "return_generation_logits": "logits are not returned",
        "return_perf_metrics": "use return_timings",
        "pad_id": "batches are not padded here",
        "top_logprobs": "use logprobs",
    }
)
"""Names that other servers' clients send, with why they are refused here."""

IGNORED_PARAMETERS = frozenset(
    {"id", "sequence_id", "sequence_start", "sequence_end", "binary_data_output", "timeout"}
)
"""Request parameters that belong to Triton, not to us (also ``triton_*``)."""
TRACE_PARAMETERS = frozenset({"traceparent", "tracestate"})
"""The W3C trace context, which the server may make of headers: their names come in any case."""
