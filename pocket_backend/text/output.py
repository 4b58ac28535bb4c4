"""The text of one output: incremental decoding and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence

from pocket_backend.api.sampling_params import SamplingParams
from pocket_backend.text.incremental import IncrementalDetokenizer, TextChunk
from pocket_backend.text.stop_strings import StopMatcher
from pocket_backend.text.token_bytes import TokenBytes


class OutputText:
    """What the engine's output stage keeps per sequence. Not shared between threads.

    Push every output id, the end-of-sequence id included (a special token has no text unless
    ``skip_special_tokens`` is off), then call ``finish`` once::

        chunk = output.push(token)        # send it, if there is one
        if output.stopped is not None or ...:
            last = output.finish()        # send it with the finish reason

    The joined texts equal ``TokenBytes.decode`` of all ids, cut at the stop string; the joined
    ``token_ids`` are all ids that were pushed. Only ``finish`` may return an empty text. Text that
    may still become a stop string is held back, nothing more.
    """

    __slots__ = ("_count", "_detokenizer", "_drop", "_include_stop", "_matcher", "_min_tokens",
                 "stopped")  # fmt: skip

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """``min_tokens``: a stop string counts only if it is completed by that token or a later one
        (the first token is number 1).

        Raises:
            InvalidRequestError: a stop string is empty or not Unicode text.
        """
        self._detokenizer = IncrementalDetokenizer(
            token_bytes, skip_special_tokens=skip_special_tokens
        )
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._count = 0
        self._drop = 0
        self.stopped: str | None = None
        """The stop string that ended the text. No more ids may be pushed then."""

    @classmethod
    def for_params(cls, token_bytes: TokenBytes, params: SamplingParams) -> OutputText:
        return cls(
            token_bytes,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    def push(self, token_id: int) -> TextChunk | None:
        """Take the next token. None: nothing to send yet, or ``stopped`` was set just now and the
        rest comes from ``finish``."""
        if self.stopped is not None:
            raise RuntimeError("push after a stop string ended the text")
        if self._matcher is None:
            return self._detokenizer.push(token_id)
        self._count += 1
        data = self._detokenizer.append(token_id)
        if data:
            match = self._matcher.advance(data, honour=self._count >= self._min_tokens)
            if match is not None:
                self.stopped, end = match
                self._drop = len(data) - end
                if not self._include_stop:
                    self._drop += len(self.stopped.encode("utf-8"))
                return None
        return self._detokenizer.release(self._matcher.hold)

    def finish(self) -> TextChunk:
        """The last chunk, with everything that was held back; its text may be empty."""
        return self._detokenizer.close(self._drop)
