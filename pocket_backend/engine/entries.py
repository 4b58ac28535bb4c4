"""A submitted request on its way through the engine, and what a step reports of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pocket_backend.engine.output import RequestOutput
from pocket_backend.text.bad_words import BadWords

if TYPE_CHECKING:
    from pocket_backend.api import GenerationRequest
    from pocket_backend.core import ScheduledRequest, StepPlan
    from pocket_backend.engine.streams import EventSink
    from pocket_backend.text.token_bytes import TokenBytes


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A submitted request: what the client asked and where its events go. One output per choice.

    Made on the caller's thread; from ``EngineLoop.submit`` on, the engine thread's.
    """

    request: GenerationRequest
    sink: EventSink
    outputs: list[RequestOutput]
    open_choices: int = field(init=False)
    sequence: ScheduledRequest | None = None
    """The first choice's sequence once the scheduler has accepted it."""

    def __post_init__(self) -> None:
        self.open_choices = len(self.outputs)

    @property
    def finished(self) -> bool:
        return self.open_choices == 0


def make_entry(
    request: GenerationRequest,
    sink: EventSink,
    arrival: float,
    token_bytes: TokenBytes | None,
) -> RequestEntry:
    """Prepare a validated request that arrived at ``arrival``, on the engine's clock. Any thread.

    Raises:
        InvalidRequestError: a stop string or bad word that is not Unicode text.
    """
    params, bad_words = request.sampling_params, None
    if params.bad_words and token_bytes is not None:
        bad_words = BadWords(
            params.bad_words,
            token_bytes,
            skip_special_tokens=params.skip_special_tokens,
        )
    outputs = [
        RequestOutput(request, arrival, token_bytes, choice, bad_words)
        for choice in range(params.n)
    ]
    if params.prompt_logprobs is not None:
        # Every prompt token has to be computed: a namespace of its own finds nothing cached.
        # What it does find after a preemption, it has reported.
        salt = f"prompt-logprobs:{secrets.token_hex(16)}"
        request = replace(request, cache_salt=salt)
    return RequestEntry(request, sink, outputs)


@dataclass(slots=True)
class StepReport:
    """What an iteration did, for hooks, which may keep but not change it. All zero but ``events``
    and ``finished`` if no step ran."""

    seconds: float = 0.0
    """Time in ``execute_model``."""
    began: float = 0.0
    """When it was called, on the engine's clock."""
    ended: float = 0.0
    sequences: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    failed: bool = False
    events: int = 0
    """Events delivered to sinks since the last report."""
    plan: StepPlan | None = None
    """What ran. Its sequences go on changing: a hook copies what it keeps."""
    finished: tuple[RequestEntry, ...] = ()
    """Requests whose last event was delivered since the last report."""
