"""Layers that keep a state instead of keys and values, inside a packed step.

Linear attention and convolution layers of Transformers do not go through its attention interface:
they read and write a cache object. So each such module gets its rows sequence by sequence, and an
object in the cache's place that holds the states of just these rows: all decodes together as a
batch of one token each, every chunk by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from pocket_backend.api import EngineError, ModelLoadError
from pocket_backend.executors.torch_attention import STEP_KEYWORD
from pocket_backend.executors.torch_states import (
    LayerStates,
    StateKey,
    StateRows,
    StateShape,
    StateStorage,
)

RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})
"""Kinds of layers, by the names of ``config.layer_types``, that work through a cache's states."""
RECURRENT_MODELS = frozenset(
    {
        "bamba",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    }
)
"""Values of ``model_type`` that the tests hold to Transformers. Others are refused: a layer that
takes a cache may still compute a prompt that comes in chunks wrongly, as those below would."""
_SCAN_FROM_ZERO = frozenset({"falcon_mamba", "jamba", "mamba"})
"""Models whose layers begin several tokens at a state of zero whatever the cache holds, and go on
from it with one token at a time only."""
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What the parameter is called, the newest name first."""


class StateCache:
    """What a mixer sees of Transformers' cache: the states of its rows in one layer.

    ``states`` maps keys to tensors [sequences, ...]; None: the sequences begin here, so that the
    layer takes the way that it takes for a prompt. After the layer ran, ``states`` holds the new
    ones. Methods have the names and arguments of ``transformers.Cache``.
    """

    def __init__(self, states: dict[StateKey, Tensor] | None) -> None:
        self._before = states
        self.states: dict[StateKey, Tensor] = {} if states is None else states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self._get("conv", state_idx)

    def get_recurrent_state(
        self,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
    ) -> Tensor | None:
        return self._get("recurrent", state_idx)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append columns [sequences, channels, tokens] and keep the last ``conv_kernel_size``."""
        before = self._get("conv", state_idx)
        width = conv_kernel_size
        if width is None:
            width = conv_states.shape[-1] if before is None else before.shape[-1]
        if before is None:
            whole = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            whole = torch.cat((before, conv_states), dim=-1)
        self.states["conv", state_idx] = whole[..., -width:]
        return whole

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        **_: Any,
    ) -> Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:  # noqa: ARG002
        return self._before is not None

    def is_recording_past(self, layer_idx: int | None = None) -> bool:  # noqa: ARG002
        return False

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's name."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def _get(self, kind: str, index: int) -> Tensor | None:
        return None if self._before is None else self._before.get((kind, index))


class RecurrentLayers:
    """The recurrent layers of a model, whose modules it makes ask for their states here.

    Args:
        model: of Transformers.
        name: its ``model_type``.
        layers: indices of its recurrent layers.

    Raises:
        ModelLoadError: a layer has no module that takes a cache.
    """

    def __init__(self, model: nn.Module, name: str, layers: Sequence[int]) -> None:
        self._one_by_one = name in _SCAN_FROM_ZERO
        self.shapes: dict[int, LayerStates] = {}
        """Filled by the first run, which is the probe's: one sequence of one token."""
        self._step: tuple[StateRows, StateStorage] | None = None
        for layer in layers:
            module, cache_name = _mixer(model, layer)
            module.forward = functools.partial(self._forward, layer, module.forward, cache_name)
        self._count = len(layers)

    def check(self, name: str) -> None:
        """After the probe.

        Raises:
            ModelLoadError: a layer kept nothing.
        """
        if len(self.shapes) != self._count or not all(self.shapes.values()):
            raise ModelLoadError(
                f"model: {name} has {self._count} recurrent layers, of which "
                f"{sum(map(bool, self.shapes.values()))} keep a state that the PyTorch backend sees"
            )

    def start(self, rows: StateRows, storage: StateStorage) -> None:
        """The next forward pass is this step's."""
        self._step = (rows, storage)

    def finish(self) -> None:
        """No step is in progress: it ended or failed."""
        self._step = None

    def _forward(
        self, layer: int, forward: Callable[..., Any], cache_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of a mixer's ``forward``: [1, rows, hidden] in and out."""
        hidden: Tensor = args[0] if args else kwargs.pop("hidden_states")
        kwargs.pop(STEP_KEYWORD, None)
        kwargs["attention_mask"] = None  # there is no padding

        def run(part: Tensor, cache: StateCache) -> Any:
            return forward(part, **(kwargs | {cache_name: cache}))

        if self._step is None:
            if layer in self.shapes:
                raise EngineError("recurrent layers work inside PyTorchBackend steps only")
            return self._probe(layer, hidden, run)
        rows, storage = self._step
        tensors = storage.layer(layer)
        found: list[Tensor] = []
        extra = 0
        count = rows.decodes.shape[0]
        if count:
            cache = StateCache(
                {key: tensor.index_select(0, rows.decodes) for key, tensor in tensors.items()}
            )
            out, extra = _output(run(hidden[0, :count].unsqueeze(1), cache))
            found.append(out.transpose(0, 1))
            for key, tensor in tensors.items():
                tensor.index_copy_(0, rows.decodes, cache.states[key].to(tensor.dtype))
        for slot, begin, end, fresh in rows.chunks:
            before = {key: tensor[slot : slot + 1] for key, tensor in tensors.items()}
            cache = StateCache(None if fresh else dict(before))
            length = 1 if self._one_by_one and not fresh else end - begin
            for at in range(begin, end, length):
                out, extra = _output(run(hidden[:, at : at + length], cache))
                found.append(out)
            for key, tensor in before.items():
                tensor.copy_(cache.states[key])
        joined = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return (joined, *[None] * extra) if extra else joined

    def _probe(self, layer: int, hidden: Tensor, run: Callable[[Tensor, StateCache], Any]) -> Any:
        cache = StateCache(None)
        result = run(hidden, cache)
        self.shapes[layer] = {
            key: StateShape(tuple(state.shape[1:]), state.dtype)
            for key, state in cache.states.items()
        }
        return result


def _output(result: Any) -> tuple[Tensor, int]:
    """A mixer's output, and how many other things it returned with it."""
    if isinstance(result, tuple):
        return result[0], len(result) - 1
    return result, 0


def _mixer(model: nn.Module, layer: int) -> tuple[nn.Module, str]:
    """The innermost module of a layer that takes a cache, and its name for it."""
    found: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        if getattr(module, "layer_idx", None) != layer:
            continue
        parameters = inspect.signature(module.forward).parameters
        cache_name = next((n for n in _CACHE_NAMES if n in parameters), None)
        if cache_name is not None:
            found.append((name, module, cache_name))
    if not found:
        raise ModelLoadError(
            f"model: recurrent layer {layer} of {type(model).__name__} has no module that takes a "
            "cache, which the PyTorch backend needs"
        )
    _, module, cache_name = max(found, key=lambda entry: entry[0].count("."))
    return module, cache_name
