"""How often a stream of the ensemble gets a chunk.

A chunk costs one to two and a half milliseconds of CPU time on its way through the ensemble
(generator, detokenizer, server and usually the client on the same machine), whether it carries one
token or five; computing a token of a small model costs only two to three times that. So all streams
together get a bounded number of chunks a second, and tokens that come faster share one. The first
token and the end of a stream never wait.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_PER_STREAM = 0.010
"""Of "auto": 100 chunks a second in all, so carrying them takes about a tenth of two cores. One
stream at up to 100 tokens a second is not touched; at 8 streams a chunk comes every 80 ms."""
MAX_SECONDS = 0.080
"""Of "auto": 12 updates a second still read as continuous text."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """The shortest time between two chunks of one output.

    ``seconds`` None is "auto": in proportion to the number of open streams.
    """

    seconds: float | None = None

    def interval(self, open_streams: int) -> float:
        """Seconds that must have passed since an output's last chunk before the next."""
        if self.seconds is not None:
            return self.seconds
        return min(SECONDS_PER_STREAM * open_streams, MAX_SECONDS)
