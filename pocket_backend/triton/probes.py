"""Questions to a Triton server over HTTP, in the standard library: is it there, does it answer.

Every function raises ``OSError`` (urllib's) when the server cannot be reached, does not answer in
time or answers with an error.  ``base`` is ``http://host:port``; timeouts are seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping

ENSEMBLE = "pocketllm"
ADMIN_HEADER = "pocketllm-admin"
_NOT_READY_MODEL = "draining"
_MAX_ANSWER = 1 << 20
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy of the environment would ask another machine's loopback."""


def infer(base: str, timeout: float, model: str = ENSEMBLE) -> None:
    """One real inference of one token, through the whole ensemble."""
    body = {"text_input": "Hi", "max_tokens": 1, "stream": False, "temperature": 0.0}
    _post(f"{base}/v2/models/{model}/generate", body, timeout)


def tokenize(base: str, timeout: float) -> None:
    """The tokenizer alone."""
    _post(f"{base}/v2/models/tokenizer/generate", {"text_input": "Hi"}, timeout)


def detokenize(base: str, timeout: float) -> None:
    """The detokenizer alone; the empty range of one id is empty text in any vocabulary."""
    body = {"token_ids": [0], "context_ids": [0], "text_range": [0, 0]}
    _post(f"{base}/v2/models/detokenizer/generate", body, timeout)


def live(base: str, timeout: float) -> None:
    """Triton's own liveness: its HTTP front end runs."""
    _get(f"{base}/v2/health/live", timeout)


def ready(base: str, timeout: float) -> None:
    """Triton's own readiness: models are loaded, nothing drains. Stays 200 with a dead stub."""
    _get(f"{base}/v2/health/ready", timeout)


def model_ready(base: str, model: str, timeout: float) -> None:
    """Whether Triton takes ``model`` for loaded; true also with a dead stub."""
    _get(f"{base}/v2/models/{model}/ready", timeout)


def turn_unready(base: str, admin_key: str, timeout: float) -> None:
    """Make the server's readiness false, for good, without disturbing any request.

    Triton has no switch for that.  But it counts a model that failed to load as a reason not to be
    ready, and one whose backend does not exist fails in milliseconds, without a process.

    Raises:
        OSError: also when the server goes on being ready.
    """
    config = {"name": _NOT_READY_MODEL, "backend": "none", "max_batch_size": 0}
    parameters = {"config": json.dumps(config), "file:1/empty": ""}
    try:
        _post(
            f"{base}/v2/repository/models/{_NOT_READY_MODEL}/load",
            {"parameters": parameters},
            timeout,
            {ADMIN_HEADER: admin_key},
        )
    except urllib.error.HTTPError as error:
        error.close()  # this is how the load fails as it should
    try:
        ready(base, timeout)
    except urllib.error.HTTPError as error:
        error.close()
        return
    raise OSError("the server still says that it is ready")


def reason_of(error: OSError) -> str:
    """What a server or the network said, in one short line."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            text = error.read(2000).decode(errors="replace").strip()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(text)["error"])
        return f"HTTP {error.code}: {text}" if text else f"HTTP {error.code}"
    reason = getattr(error, "reason", None)
    return str(reason or error) or type(error).__name__


def _post(
    url: str, body: Mapping[str, object], timeout: float, headers: Mapping[str, str] | None = None
) -> None:
    request = urllib.request.Request(  # noqa: S310  (callers build http URLs)
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **(headers or {})},
    )
    _open(request, timeout)


def _get(url: str, timeout: float) -> None:
    _open(urllib.request.Request(url), timeout)  # noqa: S310


def _open(request: urllib.request.Request, timeout: float) -> None:
    try:
        with _opener.open(request, timeout=timeout) as answer:
            answer.read(_MAX_ANSWER)
    except http.client.HTTPException as error:  # half an answer
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
