"""Names of every metric and span, with type, unit, labels and buckets: the only place they live.

Counters end in ``_total``, times are in seconds, labels have few values. Latency buckets are those
of vLLM, so that dashboards carry over. Definitions: *TTFT* from arrival to the first token
delivered; *inter-token latency* between two deliveries of one request; *time per output token* is
the mean after the first token of one request; *queue time* from arrival to the first scheduled
step; *prefill time* from there to the first token; *decode time* from the first to the last token.

``docs/metrics.md`` is written from here (``python tools/write_metrics_reference.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series family."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    label_values: tuple[tuple[str, ...], ...] = ()
    """Values of each label that exist (at zero) from the start; none: known when the engine is."""
    buckets: tuple[float, ...] = ()
    batched: bool = False
    """A histogram of steps or tokens. Triton takes one observation per message to the server, which
    is too dear for these; they are counted in the engine and written once a second, as the counters
    ``_bucket``, ``_count`` and ``_sum`` that make up a histogram."""
    vllm: str = ""
    """vLLM's series of the same meaning, if there is one."""

    def series_labels(self) -> list[dict[str, str]]:
        """The labels of every series that exists from the start."""
        if self.labels and not self.label_values:
            return []
        return [
            dict(zip(self.labels, values, strict=True)) for values in product(*self.label_values)
        ]


_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
         10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
              1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
            120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
_STEP = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
                16384.0)  # fmt: skip
_REQUEST_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0,
                   10000.0, 20000.0, 50000.0, 100000.0)  # fmt: skip

FINISH_REASONS = ("stop", "length", "cancelled", "error")
REFUSAL_REASONS = ("invalid", "unsupported", "overloaded", "unavailable", "internal")
CANCEL_REASONS = ("asked", "disconnected")
FAILURE_REASONS = ("deadline", "invalid", "overloaded", "unavailable", "internal")

# Requests
REQUESTS = Metric(
    "pocket_requests_total",
    "counter",
    "Requests that the engine took and that have ended, by finish reason.",
    ("reason",),
    (FINISH_REASONS,),
    vllm="vllm:request_success_total",
)
CANCELLED = Metric(
    "pocket_requests_cancelled_total",
    "counter",
    "Cancelled requests: by a control message, or because their client went away.",
    ("reason",),
    (CANCEL_REASONS,),
)
FAILED = Metric(
    "pocket_requests_failed_total",
    "counter",
    "Requests that ended with an error after the engine took them.",
    ("reason",),
    (FAILURE_REASONS,),
)
REFUSED = Metric(
    "pocket_requests_refused_total",
    "counter",
    "Requests that the engine never took: the tokenizer or the generator refused them.",
    ("reason",),
    (REFUSAL_REASONS,),
)
RUNNING = Metric(
    "pocket_requests_running",
    "gauge",
    "Sequences that hold a slot.",
    vllm="vllm:num_requests_running",
)
WAITING = Metric(
    "pocket_requests_waiting",
    "gauge",
    "Sequences admitted and not running, preempted ones included.",
    vllm="vllm:num_requests_waiting",
)
PREEMPTIONS = Metric(
    "pocket_preemptions_total",
    "counter",
    "Running sequences sent back to wait.",
    vllm="vllm:num_preemptions_total",
)
SLOTS_FREE = Metric("pocket_slots_free", "gauge", "Slots without a sequence.")

# Tokens
TOKENS = Metric(
    "pocket_tokens_total",
    "counter",
    "Tokens: of prompts and, of those, from the prefix cache (both counted at a request's first "
    "token), and generated ones as they come.",
    ("type",),
    (("prompt", "generated", "cached"),),
    vllm="vllm:prompt_tokens_total, vllm:generation_tokens_total",
)
PROMPT_LENGTH = Metric(
    "pocket_request_prompt_tokens",
    "histogram",
    "Prompt tokens per request.",
    buckets=_REQUEST_TOKENS,
    vllm="vllm:request_prompt_tokens",
)
OUTPUT_LENGTH = Metric(
    "pocket_request_generated_tokens",
    "histogram",
    "Generated tokens per request.",
    buckets=_REQUEST_TOKENS,
    vllm="vllm:request_generation_tokens",
)

# Memory
KV_BLOCKS = Metric(
    "pocket_kv_blocks",
    "gauge",
    "KV blocks by state: free, used by sequences, cached only. Their sum is the pool.",
    ("state",),
    (("free", "used", "cached"),),
    vllm="vllm:kv_cache_usage_perc",
)
PREFIX_QUERIES = Metric(
    "pocket_prefix_cache_queries_total",
    "counter",
    "Tokens looked up in the prefix cache when sequences were first admitted.",
    vllm="vllm:prefix_cache_queries_total",
)
PREFIX_HITS = Metric(
    "pocket_prefix_cache_hits_total",
    "counter",
    "Of those, tokens found.",
    vllm="vllm:prefix_cache_hits_total",
)

# Saved states of models that keep one (all zero for others)
SNAPSHOTS = Metric(
    "pocket_state_snapshots",
    "gauge",
    "Places for saved recurrent states, by state: free, being written, saved.",
    ("state",),
    (("free", "writing", "saved"),),
)
SNAPSHOT_BYTES = Metric("pocket_state_snapshot_bytes", "gauge", "Memory of saved states, in bytes.")
SNAPSHOT_SAVES = Metric("pocket_state_snapshot_saves_total", "counter", "States saved.")
SNAPSHOT_HITS = Metric(
    "pocket_state_snapshot_hits_total",
    "counter",
    "Sequences that started from a saved state, resumed ones included.",
)
SNAPSHOT_EVICTIONS = Metric(
    "pocket_state_snapshot_evictions_total",
    "counter",
    "Saved states given up: for a newer one, or because their KV block was evicted.",
    ("reason",),
    (("newer", "block"),),
)

# Latencies of requests that ended with stop or length
TTFT_SECONDS = Metric(
    "pocket_ttft_seconds",
    "histogram",
    "Arrival to first token.",
    buckets=_TTFT,
    vllm="vllm:time_to_first_token_seconds",
)
INTER_TOKEN_SECONDS = Metric(
    "pocket_inter_token_latency_seconds",
    "histogram",
    "Time between two deliveries of a request (of all requests, as they run).",
    buckets=_PER_TOKEN,
    batched=True,
    vllm="vllm:inter_token_latency_seconds",
)
TPOT_SECONDS = Metric(
    "pocket_request_time_per_output_token_seconds",
    "histogram",
    "Mean time per output token after the first, per request of two tokens or more.",
    buckets=_PER_TOKEN,
    vllm="vllm:request_time_per_output_token_seconds",
)
DURATION_SECONDS = Metric(
    "pocket_request_duration_seconds",
    "histogram",
    "Arrival to end.",
    buckets=_REQUEST,
    vllm="vllm:e2e_request_latency_seconds",
)
QUEUE_SECONDS = Metric(
    "pocket_request_queue_time_seconds",
    "histogram",
    "Arrival to first step.",
    buckets=_REQUEST,
    vllm="vllm:request_queue_time_seconds",
)
PREFILL_SECONDS = Metric(
    "pocket_request_prefill_time_seconds",
    "histogram",
    "First step to first token.",
    buckets=_REQUEST,
    vllm="vllm:request_prefill_time_seconds",
)
DECODE_SECONDS = Metric(
    "pocket_request_decode_time_seconds",
    "histogram",
    "First token to last token.",
    buckets=_REQUEST,
    vllm="vllm:request_decode_time_seconds",
)

# Engine
STEPS = Metric("pocket_steps_total", "counter", "Engine steps.", ("result",), (("ok", "failed"),))
STEP_SECONDS = Metric(
    "pocket_step_seconds",
    "histogram",
    "Time of one engine step in the backend.",
    buckets=_STEP,
    batched=True,
)
BATCH_SIZE = Metric(
    "pocket_batch_size", "histogram", "Sequences per step.", buckets=_BATCH, batched=True
)
STEP_TOKENS = Metric(
    "pocket_step_tokens",
    "histogram",
    "Tokens computed per step.",
    buckets=_STEP_TOKENS,
    batched=True,
    vllm="vllm:iteration_tokens_total",
)
STALLS = Metric(
    "pocket_stalls_total", "counter", "Times that work waited and no step ended for long."
)
INTEGRITY_FAILURES = Metric(
    "pocket_integrity_failures_total", "counter", "Failed checks of KV block accounting when idle."
)
ENGINE_INFO = Metric(
    "pocket_engine_info",
    "gauge",
    "Always 1; which build serves which model file.",
    ("version", "backend", "model"),
    vllm="vllm:cache_config_info",
)

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

# Spans (docs/tracing.md). The gateway's is in ``client/``, which knows nothing of this package.
SPAN_REQUEST = "pocketllm.request"
SPAN_QUEUE = "pocketllm.queue"
SPAN_PREFILL = "pocketllm.prefill"
SPAN_DECODE = "pocketllm.decode"
SPAN_DETOKENIZE = "pocketllm.detokenize"
