"""``python -m pocket_client.gateway --upstream 127.0.0.1:8001``

Exit status: 0 stopped by Ctrl-C, 2 wrong usage or settings, 3 it could not listen. SIGTERM lets
open answers finish, and then ends the process as SIGTERM does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import uvicorn

from pocket_client.gateway.app import create_app
from pocket_client.gateway.auth import ApiKeys, entry_of
from pocket_client.gateway.settings import GatewaySettings

KEYS_VARIABLE = "POCKETLLM_API_KEYS"
SECRET_VARIABLE = "POCKETLLM_CACHE_SECRET"  # noqa: S105  (its name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.hash_key is not None:
        return _make_key(options.hash_key)
    try:
        settings = _settings(options, os.environ)
        guarded = settings.api_keys or options.allow_unauthenticated
        if not guarded:
            _check_private(options)
        app = create_app(settings)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=http_protocol(),
        log_level=options.log_level,
        access_log=options.access_log,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=options.drain_seconds,
    )
    gc.collect()
    gc.freeze()  # what was built so far stays: no full collection under load looks at it again
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pocket_client.gateway",
        description="OpenAI-compatible gateway in front of a Triton server with PocketLLM.",
        epilog=f"Environment: {KEYS_VARIABLE} holds key entries separated by commas or newlines; "
        f"{SECRET_VARIABLE} is what cache salts derive from, for several gateways that share one.",
    )
    default = GatewaySettings()
    parser.add_argument(
        "--upstream",
        default=default.upstream,
        metavar="ADDRESS[,...]",
        help="Triton's gRPC "
        "host:port; several by commas; dns://NAME:PORT for every address of a name",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument(
        "--published-host",
        metavar="ADDRESS",
        help="in a container: the host's address that its port is published on, which decides "
        "instead of --host whether API keys are needed",
    )
    parser.add_argument("--model-name", default=default.model_name, help="id in /v1/models")
    parser.add_argument(
        "--api-keys-file", type=Path, help="lines of TENANT:sha256:HEX; see --hash-key"
    )
    parser.add_argument("--request-timeout", type=float, default=default.request_timeout)
    parser.add_argument("--max-body-bytes", type=int, default=default.max_body_bytes)
    parser.add_argument("--max-choices", type=int, default=default.max_choices)
    parser.add_argument("--max-in-flight", type=int, default=default.max_in_flight)
    parser.add_argument(
        "--max-in-flight-per-tenant", type=int, default=default.max_in_flight_per_tenant
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=default.max_waiting,
        help="requests beyond --max-in-flight that wait, fairly by tenant (0)",
    )
    parser.add_argument(
        "--max-waiting-per-tenant", type=int, default=default.max_waiting_per_tenant
    )
    parser.add_argument("--max-wait-seconds", type=float, default=default.max_wait_seconds)
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30,
        help="what open answers get after SIGTERM (%(default)s)",
    )
    parser.add_argument("--requests-per-minute", type=int, help="generation requests of one tenant")
    parser.add_argument(
        "--tokens-per-minute", type=int, help="tokens of one tenant's prompts and answers"
    )
    parser.add_argument(
        "--cors-origin", action="append", default=[], help="allow this web origin (repeatable)"
    )
    parser.add_argument(
        "--allowed-host", action="append", default=[], help="Host names to answer without keys"
    )
    parser.add_argument(
        "--allow-unauthenticated", action="store_true", help="listen beyond loopback without keys"
    )
    parser.add_argument(
        "--no-console", action="store_true", help="serve no web console (/, /console/)"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning"))
    parser.add_argument("--access-log", action="store_true")
    parser.add_argument(
        "--hash-key", metavar="TENANT", help="make a new key for TENANT, print it and its entry"
    )
    return parser


def _settings(options: argparse.Namespace, environment: Mapping[str, str]) -> GatewaySettings:
    """Raises ValueError or OSError."""
    lines = environment.get(KEYS_VARIABLE, "").replace(",", "\n").splitlines()
    if options.api_keys_file is not None:
        lines += options.api_keys_file.read_text(encoding="utf-8").splitlines()
    secret = environment.get(SECRET_VARIABLE, "")
    if secret and len(secret) < 16:
        raise ValueError(f"{SECRET_VARIABLE}: must have at least 16 characters")
    return GatewaySettings(
        upstream=options.upstream,
        api_keys=ApiKeys.parse(lines, secret.encode() or None),
        model_name=options.model_name,
        request_timeout=options.request_timeout,
        max_body_bytes=options.max_body_bytes,
        max_choices=options.max_choices,
        max_in_flight=options.max_in_flight,
        max_in_flight_per_tenant=options.max_in_flight_per_tenant,
        max_waiting=options.max_waiting,
        max_waiting_per_tenant=options.max_waiting_per_tenant,
        max_wait_seconds=options.max_wait_seconds,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        console=not options.no_console,
        cors_origins=tuple(options.cors_origin),
        allowed_hosts=tuple(name.lower() for name in options.allowed_host),
    )


def http_protocol() -> type[asyncio.Protocol] | Literal["h11"]:
    """The fast parser where it is installed; uvicorn's own choice of loop is uvloop likewise."""
    try:
        from pocket_client.gateway.protocol import BoundedProtocol
    except ImportError:
        return "h11"
    return BoundedProtocol


def _seconds(text: str) -> int:
    """Raises ArgumentTypeError, which argparse reports with the option's name."""
    if not text.isdecimal() or int(text) > 86_400:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be a whole number from 0 to 86400")
    return int(text)


def _check_private(options: argparse.Namespace) -> None:
    """Raises ValueError unless only this machine can reach a gateway without keys."""
    option, host = "--host", options.host
    if options.published_host is not None:
        option, host = "--published-host", options.published_host
    if not _is_loopback(host):
        raise ValueError(
            f"{option} {host} would be open to everybody: set API keys ({KEYS_VARIABLE} or "
            "--api-keys-file; --hash-key makes one), or say --allow-unauthenticated"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _make_key(tenant: str) -> int:
    key = f"pk-{secrets.token_urlsafe(32)}"
    try:
        entry = entry_of(tenant, key)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"key (give it to the client, it is not stored): {key}\nentry: {entry}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
