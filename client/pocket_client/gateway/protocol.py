"""HTTP/1.1 by httptools' parser in C, which costs a request less than half of what h11 does.

That parser keeps a header or trailer however long it gets; h11 stops at 64 KiB, and so does this.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of what a message has besides its body: request line, headers, trailers, and what the framing of
chunks takes beyond as much as there is in them."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A message beyond the bound gets 400, and the connection ends."""

    _surplus = 0
    """Bytes of the message under way, less twice those of its body; what arrives together with its
    first byte does not count."""

    def data_received(self, data: bytes) -> None:
        self._surplus += len(data)
        super().data_received(data)
        if self._surplus > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def on_message_begin(self) -> None:
        self._surplus = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._surplus -= 2 * len(body)
        super().on_body(body)
