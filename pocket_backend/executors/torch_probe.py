"""Finds out what a model's layers keep, by running it once on one token.

Configurations name heads and widths differently, and some not at all (MLA); the attention function
sees them all. The same run shows whether the model passes our step through to its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pocket_backend.api import ModelLoadError
from pocket_backend.executors.torch_attention import STEP_KEYWORD, LayerCall
from pocket_backend.executors.torch_recurrent import (
    RECURRENT_LAYERS,
    RECURRENT_MODELS,
    RecurrentLayers,
)
from pocket_backend.executors.torch_storage import KvShape

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_MEMORYLESS_LAYERS = frozenset({"mlp", "moe"})
"""Kinds of layers of their own in some hybrids; elsewhere a part of every layer."""
STATE_CONTEXT = 1 << 17
"""Tokens of a model whose layers all keep a state of fixed size and whose configuration names no
limit. Nothing but the scheduler's notes grows with them."""
_BATCH_DEPENDENT_ROPE = "longrope"
"""Chooses its frequencies by the longest sequence of a batch: neighbours would change tokens."""


@dataclass(slots=True)
class _Probe:
    """An ``Attender`` that records what it is asked for and answers zeros."""

    shapes: dict[int, KvShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape = KvShape(key.shape[1], key.shape[3], value.shape[3], key.dtype)
        if self.shapes.setdefault(call.layer, shape) != shape or value.dtype != key.dtype:
            raise ModelLoadError(f"model: layer {call.layer} attends twice with different shapes")
        self.windows[call.layer] = call.window
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What a model's layers keep."""

    attention: Mapping[int, KvShape]
    """Per token, by layer index."""
    recurrent: RecurrentLayers | None
    """None: there are none."""


def probe_layers(model: Any, device: torch.device) -> ModelLayers:
    """What every layer keeps.

    Raises:
        ModelLoadError: the model has layers that are neither attention over all or the last tokens
            nor recurrent layers that work through a cache's states.
    """
    config = model.config.get_text_config()
    name = getattr(config, "model_type", type(model).__name__)
    kinds: list[str] = list(getattr(config, "layer_types", None) or ())
    other = sorted(set(kinds) - _ATTENTION_LAYERS - RECURRENT_LAYERS - _MEMORYLESS_LAYERS)
    states = [layer for layer, kind in enumerate(kinds) if kind in RECURRENT_LAYERS]
    if other or (getattr(model, "_is_stateful", False) and not states):
        raise ModelLoadError(
            f"model: {name} has layers of the kind {', '.join(other) or 'recurrent'}, which the "
            "PyTorch backend does not run in this version"
        )
    if states and name not in RECURRENT_MODELS:
        raise ModelLoadError(
            f"model: {name} has recurrent layers that the PyTorch backend does not run in this "
            f"version; it runs {', '.join(sorted(RECURRENT_MODELS))}"
        )
    # Hybrids of today do not set the flag, though their attention layers use the interface; the
    # probe sees whether they do.
    if not states and not getattr(model, "_supports_attention_backend", False):
        raise ModelLoadError(
            f"model: {name} does not go through Transformers' attention interface, which the "
            "PyTorch backend needs"
        )
    recurrent = RecurrentLayers(model, name, states) if states else None
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=device)
    with torch.inference_mode():
        model(
            input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1,
            **{STEP_KEYWORD: probe},
        )  # fmt: skip
    without = {layer for layer, kind in enumerate(kinds) if kind not in _ATTENTION_LAYERS}
    attending = sorted(set(range(config.num_hidden_layers)) - without)
    if sorted(probe.shapes) != attending:
        raise ModelLoadError(
            f"model: {name} has {len(attending)} attention layers, but "
            f"{len(probe.shapes)} layers attend through Transformers' attention interface"
        )
    for layer, kind in enumerate(kinds):
        if layer in probe.windows and (kind == "sliding_attention") != (
            probe.windows[layer] is not None
        ):
            raise ModelLoadError(
                f"model: {name} does not tell the attention function the window of layer {layer} "
                f"({kind})"
            )
    if recurrent is not None:
        recurrent.check(name)
    return ModelLayers(probe.shapes, recurrent)


def context_limit(model: Any) -> int:
    """Tokens that a sequence may hold without leaving what the model was made for."""
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", 0) or 0)
    kinds = getattr(config, "layer_types", None)
    if not limit and kinds and RECURRENT_LAYERS.issuperset(kinds):
        return STATE_CONTEXT
    if limit < 2:
        raise ModelLoadError("model: config.json has no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == _BATCH_DEPENDENT_ROPE:
        limit = min(limit, int(rope.get("original_max_position_embeddings", limit)))
    return limit
