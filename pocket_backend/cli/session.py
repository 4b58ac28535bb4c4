"""Where answers come from: an engine in this process, or a server. Both look the same to a command.

`LocalSession` owns an ``LLM``; `RemoteSession` owns a client of ``pocket_client``. A session may be
used from several threads; leaving a stream (also by Ctrl-C) cancels its request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pocket_backend.api import BackendUnavailableError, InvalidRequestError, SamplingParams
from pocket_backend.cli.console import Waiting, amount
from pocket_backend.cli.options import check_source, engine_args

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs
    from pocket_backend.engine.llm import LLM
    from pocket_backend.engine.loop import StepHook
    from pocket_client import Client

Message = Mapping[str, object]
DEFAULT_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of the three."""

    messages: Sequence[Message] | None = None
    """A conversation, through the model's chat template."""
    text: str | None = None
    """Used as it is."""
    token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        given = (self.messages, self.text, self.token_ids)
        assert sum(item is not None for item in given) == 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; times in seconds, on the clock of whoever asked."""

    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_seconds: float
    """From asking to the first token."""
    decode_seconds: float
    """From the first token to the end."""
    stop_reason: str | int | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first over the time after the first."""
        return (self.output_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "completion_tokens": self.output_tokens,
            },
            "ttft_seconds": round(self.ttft_seconds, 6),
            "decode_seconds": round(self.decode_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }

    def summary(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"{self.prompt_tokens} prompt tokens{cached}, {self.output_tokens} new ones "
            f"({self.finish_reason}); first token after {self.ttft_seconds * 1000:.0f} ms, then "
            f"{self.tokens_per_second:.0f} tokens/s"
        )


OnPiece = Callable[[str, int], None]
"""Called with each piece of text and the number of tokens that arrived with it."""


class Session(Protocol):
    """See the module."""

    name: str
    """The model, or the server's address: for people."""

    def ask(self, prompt: Prompt, sampling: Mapping[str, object], on_piece: OnPiece) -> Answer:
        """Run one request to its end.

        Raises:
            PocketLLMError, PocketClientError: it failed; what arrived was handed to ``on_piece``.
        """

    def tokenize(self, text: str) -> Sequence[int]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Clock:
    """Adds up one answer and its times."""

    asked: float = field(default_factory=time.monotonic)
    first: float | None = None
    texts: list[str] = field(default_factory=list)

    def arrived(self, text: str, tokens: int, on_piece: OnPiece) -> None:
        if self.first is None and tokens:
            self.first = time.monotonic()
        self.texts.append(text)
        on_piece(text, tokens)

    def answer(
        self, reason: str, usage: tuple[int, int, int], stop_reason: str | int | None
    ) -> Answer:
        ended = time.monotonic()
        first = ended if self.first is None else self.first
        prompt, cached, output = usage
        return Answer(
            "".join(self.texts),
            reason,
            prompt,
            cached,
            output,
            first - self.asked,
            ended - first,
            stop_reason,
        )


class LocalSession:
    """An engine in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.name = name
        self._llm = llm

    def ask(self, prompt: Prompt, sampling: Mapping[str, object], on_piece: OnPiece) -> Answer:
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        clock = _Clock()
        if prompt.messages is not None:
            if self._llm.tokenizer.chat_template is None:
                raise InvalidRequestError(
                    f"{self.name} has no chat template; --raw continues text as it is",
                    field="messages",
                )
            stream = self._llm.chat_stream(prompt.messages, params)
        elif prompt.text is not None:
            stream = self._llm.stream(prompt.text, params)
        else:
            stream = self._llm.stream(prompt_tokens=prompt.token_ids, sampling_params=params)
        with stream:
            for event in stream:
                if event.error is not None:
                    raise event.error
                clock.arrived(event.text, len(event.token_ids), on_piece)
                if event.finish_reason is not None:
                    break
        assert event.finish_reason is not None
        assert event.usage is not None
        usage = event.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return clock.answer(event.finish_reason, counts, event.stop_reason)

    def tokenize(self, text: str) -> Sequence[int]:
        return self._llm.tokenizer.encode(text)

    def close(self) -> None:
        self._llm.close()


class RemoteSession:
    """A running Triton server."""

    def __init__(self, client: Client, address: str) -> None:
        self.name = address
        self._client = client

    def ask(self, prompt: Prompt, sampling: Mapping[str, object], on_piece: OnPiece) -> Answer:
        clock = _Clock()
        if prompt.messages is not None:
            stream = self._client.chat_stream(prompt.messages, **sampling)  # type: ignore[arg-type]
        else:
            given = prompt.text if prompt.token_ids is None else prompt.token_ids
            assert given is not None
            stream = self._client.stream(given, **sampling)  # type: ignore[arg-type]
        with stream:
            for chunk in stream:
                clock.arrived(chunk.text, len(chunk.token_ids), on_piece)
        done = stream.completion
        usage = done.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return clock.answer(done.finish_reason, counts, done.stop_reason)

    def tokenize(self, text: str) -> Sequence[int]:
        return self._client.tokenize(text)

    def close(self) -> None:
        self._client.close()


def connect(address: str, timeout: float | None = None) -> RemoteSession:
    """A session with a running server; nothing is sent yet.

    Raises:
        InvalidRequestError: no such address can exist.
        BackendUnavailableError: tritonclient, which gRPC needs, is not installed.
    """
    from pocket_client import Client

    try:
        client = Client(address, timeout=DEFAULT_TIMEOUT if timeout is None else timeout)
    except ValueError as error:
        raise InvalidRequestError(f"--url: {error}", field="url") from None
    except ImportError as error:
        raise BackendUnavailableError(
            f"{error.name} is not installed: pip install 'tritonclient[grpc]', or give an "
            "http:// address"
        ) from None
    return RemoteSession(client, address)


def load(args: EngineArgs, step_hooks: Sequence[StepHook] = ()) -> LocalSession:
    """Load a model into this process, with a waiting line on the terminal.

    ``step_hooks`` are called on the engine thread after each step.

    Raises:
        PocketLLMError: as ``LLM``.
    """
    from pocket_backend.engine.llm import LLM

    path = args.model_path()
    size = f" ({amount(path.stat().st_size)})" if path.is_file() else ""
    with Waiting(f"loading {path.name}{size}"):
        llm = LLM(args)
    for hook in step_hooks:
        llm.engine.add_step_hook(hook)
    return LocalSession(llm, path.name)


@contextmanager
def open_session(
    options: argparse.Namespace, step_hooks: Sequence[StepHook] = ()
) -> Iterator[Session]:
    """The session that a command line means. An engine's ``step_hooks`` have been called for every
    step when the block is left; a server has none.

    Raises:
        PocketLLMError: as ``check_source``, ``connect`` and ``load``.
    """
    check_source(options)
    session: Session
    if options.url is not None:
        session = connect(options.url, options.timeout)
    else:
        session = load(engine_args(options), step_hooks)
    try:
        yield session
    finally:
        session.close()
