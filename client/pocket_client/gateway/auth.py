"""API keys: who a request is from, and which cached prefixes it may share.

A key is never stored, only its SHA-256 (keys are long and random, so a slow hash adds nothing). One
entry is ``tenant:sha256:<64 hex digits>``; several keys may belong to one tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

_ENTRY = re.compile(r"([A-Za-z0-9._-]{1,64}):sha256:([0-9a-f]{64})")
MAX_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sent a request."""

    name: str
    cache_salt: str
    """Prefixes are shared only within one salt. Clients can neither choose nor learn it: who
    could, would learn by the time to the first token what another tenant had asked."""


ANONYMOUS = Tenant("anonymous", "")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The accepted keys."""

    entries: tuple[tuple[str, bytes], ...] = ()
    """(tenant, SHA-256 of the key)."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Salts derive from it; gateways that should share a cache get the same one."""

    @classmethod
    def parse(cls, lines: Iterable[str], secret: bytes | None = None) -> ApiKeys:
        """Entries, blank lines and lines that begin with ``#``.

        Raises:
            ValueError: an entry of another form (its number is named, never its text).
        """
        entries = []
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            found = _ENTRY.fullmatch(text)
            if found is None:
                raise ValueError(
                    f"API key {number}: must be TENANT:sha256:<64 hex digits>; "
                    "python -m pocket_client.gateway --hash-key TENANT makes one"
                )
            entries.append((found.group(1), bytes.fromhex(found.group(2))))
        if len(entries) > MAX_KEYS:
            raise ValueError(f"API keys: got {len(entries)}; at most {MAX_KEYS} are accepted")
        return cls(tuple(entries)) if secret is None else cls(tuple(entries), secret)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def tenant_of(self, authorization: str) -> Tenant | None:
        """The tenant of an ``Authorization: Bearer`` header; takes the same time for every key."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(key.strip().encode()).digest()
        found = None
        for name, expected in self.entries:
            if hmac.compare_digest(digest, expected):
                found = name
        return None if found is None else Tenant(found, self._salt(found))

    def _salt(self, name: str) -> str:
        return hmac.new(self.secret, f"cache-salt:{name}".encode(), hashlib.sha256).hexdigest()


def entry_of(tenant: str, key: str) -> str:
    """The line for the key file."""
    entry = f"{tenant}:sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    if not _ENTRY.fullmatch(entry):
        raise ValueError("tenant: must be 1 to 64 characters of A-Za-z0-9._-")
    return entry
