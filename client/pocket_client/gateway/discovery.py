"""Where the model servers are: a list of addresses, names that DNS resolves to several, or both."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from pocket_client.transport import parse_address

_DNS = "dns://"
_DEFAULT_PORT = 8001


@dataclass(frozen=True, slots=True)
class UpstreamNames:
    """What ``--upstream`` says."""

    fixed: tuple[str, ...]
    """Addresses as ``Client`` takes them."""
    resolved: tuple[tuple[str, int], ...] = ()
    """(name, gRPC port): every address of the name is a server."""

    @property
    def may_be_several(self) -> bool:
        return len(self.fixed) > 1 or bool(self.resolved)


def parse_upstreams(text: str) -> UpstreamNames:
    """Addresses separated by commas; ``dns://NAME:PORT`` means every address of a name.

    Raises:
        ValueError: one of them is of another form.
    """
    fixed: list[str] = []
    resolved: list[tuple[str, int]] = []
    for item in dict.fromkeys(part.strip() for part in text.split(",")):
        if item.startswith(_DNS):
            resolved.append(_dns_name(item))
        else:
            parse_address(item)
            fixed.append(item)
    return UpstreamNames(tuple(fixed), tuple(resolved))


def _dns_name(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.path not in ("", "/"):
        raise ValueError(f"address: got {text[:100]!r}; must be like dns://triton:8001")
    return host, _DEFAULT_PORT if port is None else port


async def resolve(host: str, port: int) -> tuple[str, ...]:
    """``host:port`` of every address of a name, in a stable order.

    Raises:
        OSError: it does not resolve.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return tuple(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in hosts)
