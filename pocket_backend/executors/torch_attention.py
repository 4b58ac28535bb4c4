"""Attention of Transformers models over paged storage.

Transformers calls ``paged_attention`` in every attention layer of a model that was loaded with
``attn_implementation=ATTENTION_NAME``; the step arrives as an extra keyword of ``forward``, which
passes it through. Caches of Transformers are not used (``use_cache=False``): keys and values of a
layer are written to our blocks here and read back from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from pocket_backend.api import EngineError, ModelLoadError
from pocket_backend.executors.torch_step import PackedStep
from pocket_backend.executors.torch_storage import PagedStorage

ATTENTION_NAME = "pocketllm_paged"
STEP_KEYWORD = "pocketllm_step"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asks for besides the tensors."""

    layer: int
    scale: float
    window: int | None = None
    """How many tokens a token sees, itself included."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[query heads]: one more logit per head that takes weight and gives nothing."""


class Attender(Protocol):
    """What ``forward`` carries through the model: a step, or a probe of its shapes."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Tensors are [1, heads, rows, dim]; returns [1, rows, query heads, value dim]."""


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  (always None: this name builds no masks)
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001  (inference only)
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that Transformers calls; see its ``AttentionInterface``.

    Raises:
        EngineError: the model was called without a step.
        ModelLoadError: the layer asks for something that is not causal attention over a window.
    """
    attender: Attender | None = kwargs.get(STEP_KEYWORD)
    if attender is None:
        raise EngineError(f"attention {ATTENTION_NAME!r} works inside PyTorchBackend steps only")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelLoadError(f"{type(module).__name__}: attention that is not causal")
    if kwargs.get("position_bias") is not None:
        raise ModelLoadError(f"{type(module).__name__}: attention with a position bias")
    call = LayerCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return attender.attend(call, query, key, value), None


class PagedAttender:
    """Attends the rows of one step. K and V of the rows are stored first, then read by all."""

    def __init__(self, step: PackedStep, storage: PagedStorage) -> None:
        self._step = step
        self._storage = storage

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        storage = self._storage
        storage.write(call.layer, self._step.places, key[0], value[0])
        layout = self._step.layout(call.window)
        found: list[Tensor] = []  # [rows, query heads, value dim] in row order
        for group in layout.groups:
            keys, values = storage.gather(call.layer, group.blocks)
            rows = query[0, :, group.begin : group.end].transpose(0, 1).unsqueeze(2)
            found.append(_attend(call, rows, keys, values, group.mask)[:, :, 0])
        for chunk in layout.chunks:
            rows = query[:, :, chunk.begin : chunk.end]
            if chunk.blocks is None:
                keys = key[:, :, chunk.begin : chunk.end]
                values = value[:, :, chunk.begin : chunk.end]
            else:
                keys, values = storage.gather(call.layer, chunk.blocks)
            found.append(_attend(call, rows, keys, values, chunk.mask)[0].transpose(0, 1))
        return (found[0] if len(found) == 1 else torch.cat(found)).unsqueeze(0).contiguous()


def _attend(
    call: LayerCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """[sequences, query heads, rows, value dim].

    Args:
        query: [sequences, query heads, rows, key dim].
        key, value: [sequences, kv heads, keys, key or value dim].
        mask: broadcastable to [sequences, 1, rows, keys], added; None: causal, rows == keys.
    """
    if call.softcap is not None or call.sinks is not None:
        return _attend_plainly(call, query, key, value, mask)
    sequences, heads, rows, _ = query.shape
    if rows > 1:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=call.scale,
            enable_gqa=heads != key.shape[1],
        )
    # One row: the query heads of a KV head can be its rows, so that nothing is repeated.
    kv_heads = key.shape[1]
    packed = query.reshape(sequences, kv_heads, heads // kv_heads, -1)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=call.scale)
    return out.reshape(sequences, heads, 1, -1)


def _attend_plainly(
    call: LayerCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """With soft-cap and sinks, which the fused operation does not have. Scores are float32."""
    sequences, heads, rows, _ = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    grouped = query.reshape(sequences, kv_heads, heads // kv_heads * rows, -1)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float() * call.scale
    scores = scores.view(sequences, heads, rows, keys)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is None:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    if call.sinks is not None:
        sinks = call.sinks.float().view(1, heads, 1, 1).expand(sequences, heads, rows, 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    weights = weights.to(value.dtype).view(sequences, kv_heads, -1, keys)
    return torch.matmul(weights, value).view(sequences, heads, rows, -1)
