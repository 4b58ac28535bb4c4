"""Options about snapshots of recurrent state, the same for every backend.

For models without such state they are checked and otherwise mean nothing.
"""

from __future__ import annotations

from pocket_backend.api import ConfigurationError
from pocket_backend.api.errors import short_repr

MOST_SNAPSHOTS = 82
"""No more by default; beyond that a client has to ask for them."""
_FEWEST_SNAPSHOTS = 4
_MEMORY_SHARE = 0.1
CPU_INTERVAL, DEVICE_INTERVAL = 512, 4096
"""Tokens between two snapshots of a sequence by default."""


def check_state_options(max_snapshots: object, interval: object) -> None:
    """``max_state_snapshots`` and ``state_snapshot_interval_tokens``; None: chosen for the model.

    Raises:
        ConfigurationError: names the option, the value and the remedy.
    """
    for name, value, low in (
        ("max_state_snapshots", max_snapshots, 0),
        ("state_snapshot_interval_tokens", interval, 1),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1 << 20:
            raise ConfigurationError(
                f"{name}: got {short_repr(value)}; must be an integer from {low} to {1 << 20}"
            )


def default_snapshots(state_bytes: int, kv_bytes: int, available_bytes: int | None) -> int:
    """Places for states when nobody says how many: as much memory as the KV pool takes, since
    cached blocks are of use only with a state at their end; 4 at least, 82 at most, and never more
    than a tenth of the memory that is left.

    Args:
        state_bytes: of one slot, above 0.
        kv_bytes: of the KV pool; 0: the model keeps nothing but states.
        available_bytes: what the device has left; None: unknown.
    """
    count = MOST_SNAPSHOTS
    if kv_bytes:
        count = min(count, max(_FEWEST_SNAPSHOTS, kv_bytes // state_bytes))
    if available_bytes is not None:
        count = min(count, int(available_bytes * _MEMORY_SHARE) // state_bytes)
    return max(0, count)


def snapshot_interval(asked: int | None, *, on_cpu: bool) -> int:
    """Tokens between two snapshots of a sequence.

    The default on a CPU is what a step computes by default: the interval makes no step shorter by
    more than a block, a state is copied once in about as many tokens, and who hits or resumes
    computes at most about one step again. Accelerators compute that much sooner, and their memory
    is better used for KV, so there it is the older API's 4,096.
    """
    if asked is not None:
        return asked
    return CPU_INTERVAL if on_cpu else DEVICE_INTERVAL
