"""What the detokenizer tells the generator: nobody reads this stream; so many chunks are done.

*Abandoned streams.* Triton does not cancel a running decoupled step of an ensemble; only the *next*
request of the following step, the detokenizer's, is marked as cancelled. So the generator puts a
stream key into every response, and the detokenizer sends the key back when it sees the mark.

*Progress.* Triton queues what a decoupled step sends without any bound. The generator counts what
it sent and the detokenizer reports what it did, so that the generator can merge chunks instead of
letting the queue grow when the detokenizer falls behind.

Both travel as datagrams to an abstract Unix socket, not as requests through Triton (BLS): a request
would have to be answered by the generator's engine thread, the only one that may send, hence after
the step in progress, and the detokenizer, which serves everybody's chunks one by one, would wait
for it. A datagram costs microseconds and waits for nothing. A lost key is made good by the stream's
next chunk; a lost report by the next time that no stream is open.

Keys are ``<channel>:<stream>``, both random; knowing a key is what allows to cancel its stream. The
key in a traced stream's last chunk ends with ``END_MARK``, so that the detokenizer, which keeps no
state otherwise, knows when to end its span.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Callable

_KEY = re.compile(r"([0-9a-f]{16}):[0-9a-f]{32}")
_CLOSE = b"close"
_DONE = b"done"
END_MARK = "!"
REPORT_EVERY = 16
"""Chunks per report: the count is this much too old at most, and reports are cheap."""


class FeedbackListener:
    """The generator's end.

    ``on_abandoned`` is called on a thread of its own, for well-formed keys of this channel only.
    """

    def __init__(self, on_abandoned: Callable[[str], object]) -> None:
        self.done = 0
        """Chunks that the detokenizer reported. Only ever grows; read from any thread."""
        self._channel = secrets.token_hex(8)
        self._on_abandoned = on_abandoned
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(self._channel))
        self._thread = threading.Thread(target=self._run, name="pocket-feedback", daemon=True)
        self._thread.start()

    def new_key(self) -> str:
        """The key of one more stream."""
        return f"{self._channel}:{secrets.token_hex(16)}"

    def close(self) -> None:
        """Stop listening; returns when no call of ``on_abandoned`` is under way. Idempotent."""
        if not self._thread.is_alive():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.sendto(_CLOSE, _address(self._channel))
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while (data := self._socket.recv(256)) != _CLOSE:
            if data == _DONE:
                self.done += REPORT_EVERY
                continue
            key = data.decode("ascii", "replace")
            match = _KEY.fullmatch(key)
            if match and match[1] == self._channel:
                self._on_abandoned(key)


class FeedbackSender:
    """The detokenizer's end; one thread.

    Keys come from a tensor that any client may have sent, hence the strict form: they can reach no
    other socket than one of a generator.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._channel = ""
        self._unreported = 0

    def close(self) -> None:
        self._socket.close()

    def abandoned(self, key: str) -> bool:
        """Whether the generator of ``key`` was told that nobody reads its stream; never waits."""
        match = _KEY.fullmatch(key)
        return match is not None and self._send(match[1], key.encode())

    def chunk_done(self, key: str) -> None:
        """Count one chunk of the stream ``key``, and report now and then; never waits."""
        match = _KEY.fullmatch(key)
        if match is None:
            return
        if match[1] != self._channel:  # the generator was reloaded
            self._channel, self._unreported = match[1], 0
        self._unreported += 1
        if self._unreported >= REPORT_EVERY and self._send(self._channel, _DONE):
            self._unreported -= REPORT_EVERY

    def _send(self, channel: str, data: bytes) -> bool:
        try:
            self._socket.sendto(data, _address(channel))
        except OSError:  # the generator is gone, or its queue is full
            return False
        return True


def _address(channel: str) -> str:
    return f"\0pocketllm-{channel}"
