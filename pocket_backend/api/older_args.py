"""Fields of the older API's ``EngineArgs`` whose feature this version does not have.

They exist so that scripts keep working while they leave them at their defaults; anything else is
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pocket_backend.api.errors import ConfigurationError, UnsupportedFeatureError, short_repr

OLDER_BACKENDS = ("v41", "mimo", "xing4")

_ALLOWED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "config_path": ((None,), "a model's own config.json is read"),
        "tensor_parallel_size": ((1,), "an engine is one process"),
        "tensor_parallel_rank": ((0,), "an engine is one process"),
        "device_ids": ((None, ()), "an engine uses one device"),
        "attention_window": ((None, 0), "a model's own sliding window applies, and no other"),
        "attention_sink_tokens": ((None, 0), "a model's own sliding window applies, and no other"),
        "speculative_method": ((None, ""), "there is no speculative decoding"),
        "speculative_tokens": ((None, 0), "there is no speculative decoding"),
    }
)


def refuse_absent(name: str, value: object) -> None:
    """Raises UnsupportedFeatureError unless ``value`` leaves the feature ``name`` off."""
    values, why = _ALLOWED[name]
    if any(value == allowed and type(value) is type(allowed) for allowed in values):
        return
    raise UnsupportedFeatureError(f"{name}={short_repr(value)}", why, field=name)


def absent_fields() -> tuple[str, ...]:
    """Names that ``refuse_absent`` knows."""
    return tuple(_ALLOWED)


def check_backend(name: object, known: tuple[str, ...]) -> None:
    """Raises UnsupportedFeatureError for the older API's special backends, else
    ConfigurationError."""
    if name in known:
        return
    if name in OLDER_BACKENDS:
        raise UnsupportedFeatureError(
            f"backend {name!r}", f"there are {', '.join(known)}", field="backend"
        )
    raise ConfigurationError(f"backend: got {short_repr(name)}; must be one of {', '.join(known)}")
