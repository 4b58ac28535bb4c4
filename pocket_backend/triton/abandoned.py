"""How the detokenizer tells the generator that nobody reads a stream any more.

Triton does not cancel a running decoupled step of an ensemble; only the *next* request of the
following step, the detokenizer's, is marked as cancelled. So the generator puts a stream key into
every response, and the detokenizer sends the key back when it sees the mark.

It sends a datagram to an abstract Unix socket, not a request through Triton (BLS): a request would
have to be answered by the generator's engine thread, the only one that may send, hence after the
step in progress, and the detokenizer, which serves everybody's chunks one by one, would wait for it
once per client that left. A datagram costs microseconds and waits for nothing. One that is lost is
made good by the stream's next chunk.

Keys are ``<channel>:<stream>``, both random; knowing a key is what allows to cancel its stream.
"""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Callable

_KEY = re.compile(r"([0-9a-f]{16}):[0-9a-f]{32}")
_CLOSE = b"close"


class AbandonedListener:
    """The generator's end.

    ``on_key`` is called on a thread of its own, for well-formed keys of this channel only.
    """

    def __init__(self, on_key: Callable[[str], object]) -> None:
        self._channel = secrets.token_hex(8)
        self._on_key = on_key
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(_address(self._channel))
        self._thread = threading.Thread(target=self._run, name="pocket-abandoned", daemon=True)
        self._thread.start()

    def new_key(self) -> str:
        """The key of one more stream."""
        return f"{self._channel}:{secrets.token_hex(16)}"

    def close(self) -> None:
        """Stop listening; returns when no call of ``on_key`` is under way. Idempotent."""
        if not self._thread.is_alive():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.sendto(_CLOSE, _address(self._channel))
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while (data := self._socket.recv(256)) != _CLOSE:
            key = data.decode("ascii", "replace")
            match = _KEY.fullmatch(key)
            if match and match[1] == self._channel:
                self._on_key(key)


class AbandonedNotifier:
    """The detokenizer's end; one thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def notify(self, key: str) -> bool:
        """Whether the generator of ``key`` was told; never waits.

        The key comes from a tensor that any client may have sent, hence the strict form: it can
        reach no other socket than one of a generator.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            return False
        try:
            self._socket.sendto(key.encode(), _address(match[1]))
        except OSError:  # the generator is gone, or its queue is full
            return False
        return True


def _address(channel: str) -> str:
    return f"\0pocketllm-{channel}"
