"""The gateway of `pocketllm serve --gateway-port`: ends, after its open answers, with its parent.

``python -m pocket_backend.cli.gateway_child ARGS``: as ``python -m pocket_client.gateway ARGS``,
and the end of standard input asks it to end.  The parent holds the other side of that pipe, so
closing it, a crash and ``kill -9`` of the parent all do.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from pocket_client.gateway.__main__ import main


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    sys.exit(main(sys.argv[1:]))
