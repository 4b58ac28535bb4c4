"""Which TCP ports a server gets, and a clear sentence when one is taken."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from pocket_backend.api.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Ports:
    """Listening ports of one server; 0 asks for a free one."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def __post_init__(self) -> None:
        for name, port in self.named():
            if not 0 <= port <= 65535:
                raise ConfigurationError(f"{option(name)}: got {port}; must be from 0 to 65535")
        given = [port for _, port in self.named() if port]
        if len(set(given)) != len(given):
            raise ConfigurationError(
                f"ports {', '.join(map(str, given))}: HTTP, gRPC and metrics need different ports"
            )

    def named(self) -> tuple[tuple[str, int], ...]:
        return (("http", self.http), ("grpc", self.grpc), ("metrics", self.metrics))


def option(name: str) -> str:
    """The command-line option that sets the port called ``name``."""
    return f"--{name}-port"


def resolve(ports: Ports, host: str) -> Ports:
    """Check that the given ports are free on ``host`` and choose those left at 0.

    Sockets stay open until all three are known, so that the same port is not chosen twice.  Another
    process may still take one before the server binds it; the server's own error then says so.

    Raises:
        ConfigurationError: names the port, who wanted it and what to do.
    """
    held: list[socket.socket] = []
    try:
        for name, port in ports.named():
            held.append(_listen(name, port, host))
        http, grpc, metrics = (probe.getsockname()[1] for probe in held)
    finally:
        for probe in held:
            probe.close()
    return Ports(http, grpc, metrics)


def resolve_one(name: str, port: int, host: str) -> int:
    """As ``resolve``, for the one port of the option ``--<name>-port``.

    Raises:
        ConfigurationError: as ``resolve``, or out of range.
    """
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"{option(name)}: got {port}; must be from 0 to 65535")
    with _listen(name, port, host) as probe:
        chosen: int = probe.getsockname()[1]
    return chosen


def _listen(name: str, port: int, host: str) -> socket.socket:
    """A socket on ``port``, to be closed; raises ConfigurationError if nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen(1)
    except OSError as error:
        probe.close()
        raise ConfigurationError(_explain(name, port, host, error)) from None
    return probe


def _explain(name: str, port: int, host: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is already in use (wanted for {name}): stop what listens there "
            f"or choose another with {option(name)} (0 picks a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose one above 1023 with {option(name)}"
    return f"cannot listen on {host}:{port} for {name}: {error.strerror}"
