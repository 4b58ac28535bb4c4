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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    chosen: dict[str, int] = {}
    held: list[socket.socket] = []
    try:
        for name, port in ports.named():
            probe = socket.socket(family, socket.SOCK_STREAM)
            held.append(probe)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                raise ConfigurationError(_explain(name, port, host, error)) from None
            chosen[name] = probe.getsockname()[1]
    finally:
        for probe in held:
            probe.close()
    return Ports(**chosen)


def _explain(name: str, port: int, host: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} on {host} is already in use (wanted for {name}): stop what listens there "
            f"or choose another with {option(name)} (0 picks a free one)"
        )
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges: choose one above 1023 with {option(name)}"
    return f"cannot listen on {host}:{port} for {name}: {error.strerror}"
