"""Names of every metric and span, with type, unit, labels and buckets: the only place they live.

Counters end in ``_total``, times are in seconds, labels have few values. Latency buckets are those
of vLLM, so that dashboards carry over. Definitions: *TTFT* from arrival to the first token
delivered; *inter-token latency* between two deliveries of one request; *time per output token* is
the mean after the first token of one request; *queue time* from arrival to the first scheduled
step; *prefill time* from there to the first token; *decode time* from the first to the last token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series family."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    label_values: tuple[tuple[str, ...], ...] = ()
    """Values of each label that exist (at zero) from the start."""
    buckets: tuple[float, ...] = ()


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
         10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
              1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
            120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_STEP = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

FINISH_REASONS = ("stop", "length", "cancelled", "error")
REFUSAL_REASONS = ("invalid", "unsupported", "overloaded", "unavailable")

REQUESTS = Metric(
    "pocket_requests_total", "counter", "Finished requests.", ("reason",), (FINISH_REASONS,)
)
REFUSED = Metric(
    "pocket_requests_refused_total",
    "counter",
    "Requests that were never admitted.",
    ("reason",),
    (REFUSAL_REASONS,),
)
TOKENS = Metric(
    "pocket_tokens_total",
    "counter",
    "Tokens of finished requests.",
    ("type",),
    (("prompt", "generated", "cached"),),
)
STEPS = Metric("pocket_steps_total", "counter", "Engine steps.", ("result",), (("ok", "failed"),))
PREEMPTIONS = Metric("pocket_preemptions_total", "counter", "Running requests sent back to wait.")
INTEGRITY_FAILURES = Metric(
    "pocket_integrity_failures_total", "counter", "Failed checks of KV block accounting when idle."
)
RUNNING = Metric("pocket_requests_running", "gauge", "Requests that hold a slot.")
WAITING = Metric("pocket_requests_waiting", "gauge", "Requests admitted and not running.")
SLOTS_FREE = Metric("pocket_slots_free", "gauge", "Slots without a sequence.")
KV_BLOCKS = Metric(
    "pocket_kv_blocks", "gauge", "KV blocks by state.", ("state",), (("free", "used", "cached"),)
)
PREFIX_QUERIES = Metric(
    "pocket_prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache."
)
PREFIX_HITS = Metric(
    "pocket_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache."
)
BATCH_SIZE = Metric("pocket_batch_size", "histogram", "Sequences per step.", buckets=_BATCH)
STEP_SECONDS = Metric("pocket_step_seconds", "histogram", "Time of one engine step.", buckets=_STEP)
TTFT_SECONDS = Metric("pocket_ttft_seconds", "histogram", "Time to first token.", buckets=_TTFT)
INTER_TOKEN_SECONDS = Metric(
    "pocket_inter_token_latency_seconds",
    "histogram",
    "Time between two deliveries of a request.",
    buckets=_PER_TOKEN,
)
TPOT_SECONDS = Metric(
    "pocket_request_time_per_output_token_seconds",
    "histogram",
    "Mean time per output token after the first, per request.",
    buckets=_PER_TOKEN,
)
DURATION_SECONDS = Metric(
    "pocket_request_duration_seconds", "histogram", "Arrival to last token.", buckets=_REQUEST
)
QUEUE_SECONDS = Metric(
    "pocket_request_queue_time_seconds", "histogram", "Arrival to first step.", buckets=_REQUEST
)
PREFILL_SECONDS = Metric(
    "pocket_request_prefill_time_seconds",
    "histogram",
    "First step to first token.",
    buckets=_REQUEST,
)
DECODE_SECONDS = Metric(
    "pocket_request_decode_time_seconds",
    "histogram",
    "First token to last token.",
    buckets=_REQUEST,
)
ENGINE_INFO = Metric("pocket_engine_info", "gauge", "Always 1.", ("version", "backend", "model"))

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

SPAN_REQUEST = "pocketllm.request"
SPAN_QUEUE = "pocketllm.queue"
SPAN_PREFILL = "pocketllm.prefill"
SPAN_DECODE = "pocketllm.decode"
SPAN_DETOKENIZE = "pocketllm.detokenize"
