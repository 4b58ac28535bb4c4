"""Kinds of devices that a backend of this installation can use."""

from __future__ import annotations

import importlib.util


def device_kinds() -> tuple[str, ...]:
    """``cpu`` always; ``cuda`` if PyTorch is installed and sees such a device (this imports it)."""
    if importlib.util.find_spec("torch") is None:
        return ("cpu",)
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
