"""`pocketllm models`: the models of directories, the installed demo model, or those of a server."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pocket_backend.api import (
    BackendUnavailableError,
    EngineError,
    InvalidRequestError,
    ModelLoadError,
)
from pocket_backend.cli import console
from pocket_backend.cli.exit_codes import OK
from pocket_backend.cli.options import Commands, add_json_option
from pocket_backend.executors.model_description import describe_model
from pocket_backend.text.gguf_files import gguf_models

KEY_VARIABLE = "POCKETLLM_API_KEY"
"""The key for a gateway that wants one."""
_MAX_DEPTH = 4
_TIMEOUT_SECONDS = 10.0
_MAX_ANSWER_BYTES = 4 << 20


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "models",
        help="list models: of directories, or of a server",
        description="List the GGUF files and safetensors directories below DIR (four levels deep), "
        "with the installed demo model; or what a server serves.",
    )
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--url", help="http://HOST:PORT of a gateway or of Triton instead")
    add_json_option(parser, "the list")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one line a model.

    Raises:
        PocketLLMError: no such directory, or the server does not answer.
    """
    if options.url is not None:
        if options.directories:
            raise InvalidRequestError("--url: does not go with DIR", field="url")
        rows = served_models(options.url)
    else:
        rows = [row for path in _local(options.directories) if (row := _row(path)) is not None]
    if options.json:
        console.print_json(rows)
        return OK
    for row in rows:
        print("  ".join(str(value) for value in row.values() if value is not None))
    if not rows:
        console.note("no models found")
    return OK


def _local(directories: list[Path]) -> Iterator[Path]:
    from pocket_backend.triton.settings import find_default_model

    if (demo := find_default_model()) is not None:
        yield demo
    for directory in directories:
        if not directory.is_dir():
            raise InvalidRequestError(f"DIR: {directory} is not a directory", field="directories")
        yield from _models_below(directory.resolve())


def _models_below(root: Path) -> Iterator[Path]:
    for name, directories, files in os.walk(root):
        here = Path(name)
        if len(here.relative_to(root).parts) >= _MAX_DEPTH:
            directories.clear()
        directories[:] = sorted(item for item in directories if not item.startswith("."))
        yield from gguf_models(here)
        if "config.json" in files and any(item.endswith(".safetensors") for item in files):
            yield here


def _row(path: Path) -> dict[str, object] | None:
    try:
        model = describe_model(path)
    except ModelLoadError as error:
        return {"path": str(path), "error": str(error)}
    kinds = [item.name for item in model.formats[:3]]
    size = model.weight_bytes
    return {
        "path": str(path),
        "architecture": model.architecture,
        "parameters": model.parameters,
        "formats": "+".join(kinds),
        "size": None if size is None else console.amount(size),
    }


def served_models(url: str) -> list[dict[str, object]]:
    """What the gateway (``/v1/models``) or Triton (its repository index) at ``url`` lists.

    Raises:
        InvalidRequestError: no HTTP address.
        BackendUnavailableError: nothing answers there.
        EngineError: the answer is neither of the two.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"--url: got {url[:100]!r}; listing needs an http:// address", field="url"
        )
    base = url.rstrip("/").removesuffix("/v1")
    try:
        listed = _ask(f"{base}/v1/models", None)
        if listed is not None:
            return [{"id": item["id"], "state": "READY"} for item in listed["data"]]
        index = _ask(f"{base}/v2/repository/index", b"{}")
        if index is not None:
            return [
                {"id": item["name"], "version": item.get("version"), "state": item.get("state")}
                for item in index
            ]
    except (KeyError, TypeError, ValueError):
        pass
    raise EngineError(f"{base} is neither a gateway nor a Triton server: it lists no models")


def _ask(url: str, body: bytes | None) -> Any:
    """Parsed JSON; None: there is no such endpoint."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, body, headers)  # noqa: S310  (http or https, checked)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310
            return json.loads(answer.read(_MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        if error.code in (400, 404, 405):
            return None
        raise EngineError(f"{url}: HTTP {error.code} {error.reason}") from None
    except OSError as error:
        raise BackendUnavailableError(f"{url}: cannot be reached: {error}") from None
