"""What a backend can do, in one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

_EMPTY: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """Of one engine, once it is loaded: ``LLM.capabilities``."""

    name: str
    """The backend: cpp, torch, or a registered one."""
    models: tuple[str, ...] = ()
    """Architectures that it runs, as far as it lists them."""
    model_formats: tuple[str, ...] = ()
    """gguf, safetensors."""
    devices: tuple[str, ...] = ()
    """Kinds of devices that it uses: see ``device_kinds``."""
    supports_batch: bool = False
    supports_streaming: bool = False
    supports_cancellation: bool = False
    supports_embeddings: bool = False
    supports_logprobs: bool = False
    supports_structured_outputs: bool = False
    supports_prefix_caching: bool = False
    supports_speculative_decoding: bool = False
    details: Mapping[str, object] = field(default_factory=lambda: _EMPTY)

    def supports(self, feature: str) -> bool:
        """By the name of a field, with or without its ``supports_``; False for unknown names."""
        name = feature if feature.startswith("supports_") else f"supports_{feature}"
        known = {item.name for item in fields(self)}
        return name in known and bool(getattr(self, name))
