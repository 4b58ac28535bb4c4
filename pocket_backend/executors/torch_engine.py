"""The executor of Transformers models: any causal language model, on whatever torch runs on.

It keeps block tables like the C++ engine's executor, packs a step into one forward pass without
padding, and samples all rows together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pocket_backend.api import BackendCapabilities, ConfigurationError, EngineError, PocketLLMError
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo
from pocket_backend.executors.base import BackendExecutor
from pocket_backend.executors.cpu_quota import quota_threads
from pocket_backend.executors.executor_options import BLOCK_SIZE
from pocket_backend.executors.memory import available_memory
from pocket_backend.executors.slot_tables import SlotTables
from pocket_backend.executors.state_options import default_snapshots, snapshot_interval
from pocket_backend.executors.torch_attention import STEP_KEYWORD, PagedAttender
from pocket_backend.executors.torch_edits import TorchEdits
from pocket_backend.executors.torch_loading import load_model
from pocket_backend.executors.torch_options import TorchOptions
from pocket_backend.executors.torch_probe import context_limit, probe_layers
from pocket_backend.executors.torch_sampler import sample
from pocket_backend.executors.torch_states import LayerStates, StateStorage, state_bytes
from pocket_backend.executors.torch_step import PackedStep
from pocket_backend.executors.torch_storage import PagedStorage

if TYPE_CHECKING:
    from pocket_backend.api import EngineArgs

_FEATURES = frozenset(
    {
        "batch_mode",
        "prefix_cache",
        "block_copies",
        "min_p",
        "min_tokens",
        "penalties",
        "logit_bias",
        "token_masks",
        "logprobs",
    }
)


class PyTorchBackend(BackendExecutor):
    """A Transformers model.

    Args:
        path: a directory with ``config.json`` and safetensors, or a GGUF file.
        options: see ``TorchOptions``; unknown names are refused.

    Raises:
        ModelLoadError: the model is missing, damaged, or has layers that cannot be paged.
        ConfigurationError: an option is out of range, or asks for more than model or device allow.
        BackendUnavailableError: a package is missing.
    """

    def __init__(
        self, path: str | Path, options: Mapping[str, object] | TorchOptions | None = None
    ) -> None:
        if not isinstance(options, TorchOptions):
            options = TorchOptions.from_mapping(options or {})
        threads = options.threads or quota_threads()
        if threads:
            torch.set_num_threads(threads)
        loaded = load_model(Path(path).expanduser(), options)
        self._model: Any = loaded.model
        self._device, self._dtype = loaded.device, loaded.dtype
        self._eos = loaded.eos_token_ids
        layers = probe_layers(loaded.model, loaded.device)
        shapes = layers.attention
        context = _context(options, context_limit(loaded.model))
        per_block = BLOCK_SIZE * sum(shape.bytes_per_token() for shape in shapes.values())
        free = _free_memory(loaded.device)
        # Without attention blocks hold nothing: they are how the scheduler notes prefixes.
        num_blocks = options.blocks(context, per_block, free if per_block else None)
        self._storage = PagedStorage(shapes, num_blocks, BLOCK_SIZE, loaded.device)
        memory = MemoryInfo(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_slots=options.max_batch_size,
            max_context=context,
            max_batch_tokens=options.max_batch_tokens,
            vocab_size=loaded.vocab_size,
            kv_cache_bytes=self._storage.nbytes,
            weight_bytes=loaded.weight_bytes,
        )
        self._recurrent = layers.recurrent
        self._states: StateStorage | None = None
        if layers.recurrent is not None:
            if free is not None:
                free -= self._storage.nbytes
            memory = _with_states(memory, options, layers.recurrent.shapes, free, loaded.device)
            self._states = StateStorage(
                layers.recurrent.shapes,
                memory.max_slots,
                memory.num_state_snapshots,
                loaded.device,
            )
        self._memory = memory
        self._tables = SlotTables(self._memory)
        self._edits = TorchEdits(options.max_batch_size, loaded.vocab_size, loaded.device)

    @classmethod
    def from_args(cls, args: EngineArgs) -> PyTorchBackend:
        """Build from ``EngineArgs``; ``backend_options`` go to ``TorchOptions`` as well."""
        options: dict[str, object] = {
            "max_batch_size": args.max_batch_size,
            "max_seq_len": args.max_model_len,
            "max_batch_tokens": args.max_num_batched_tokens,
            "kv_cache_dtype": args.kv_cache_dtype,
            "threads": args.threads,
        }
        for name in ("device", "dtype"):
            if getattr(args, name) != "auto":
                options[name] = getattr(args, name)
        if args.kv_cache_tokens is not None:
            options["kv_cache_tokens"] = args.kv_cache_tokens
        options |= args.backend_options
        return cls(args.model_path(), options)

    def get_memory_info(self) -> MemoryInfo:
        return self._memory

    def supports_feature(self, feature: str) -> bool:
        if self._recurrent is not None and feature in ("recurrent_state", "block_copies"):
            return feature == "recurrent_state"
        return feature in _FEATURES

    @property
    def capabilities(self) -> BackendCapabilities:
        return replace(
            super().capabilities,
            name="torch",
            model_formats=("safetensors", "gguf"),
            devices=(self._device.type,),
            details={"dtype": str(self._dtype).removeprefix("torch.")},
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that the generation configuration, or else the model's, names as ends."""
        return self._eos

    @property
    def device(self) -> torch.device:
        return self._device

    def reset_slot(self, slot_id: int) -> None:
        self._tables.reset(slot_id)
        self._edits.drop(slot_id)

    def close(self) -> None:
        self._model = self._recurrent = self._states = None
        self._storage = PagedStorage({}, 0, BLOCK_SIZE, self._device)

    def execute_model(self, requests: Sequence[ExecuteRequest]) -> Sequence[ExecuteOutput]:
        """See ``BackendExecutor``. torch releases the GIL inside its operations."""
        if not requests:
            return []
        if self._model is None:
            raise EngineError("execute_model after close")
        self._tables.check(requests)
        try:
            with torch.inference_mode():
                return self._execute(requests)
        except PocketLLMError:
            raise
        except RuntimeError as error:  # out of memory, a kernel that is not there
            message = " ".join(str(error).split())[:400]
            raise EngineError(f"step of {len(requests)} sequences: {message}") from error

    def _execute(self, requests: Sequence[ExecuteRequest]) -> Sequence[ExecuteOutput]:
        fresh: list[int] = []
        for request in requests:
            fresh += self._tables.advance(request)
            if request.is_new:
                self._edits.start(request)
            else:
                self._edits.advance(request)
        if fresh:
            self._storage.clear(fresh)
        copies = [pair for request in requests for pair in request.block_copies]
        if copies:
            self._storage.copy(copies)
        step = PackedStep(requests, self._tables, BLOCK_SIZE, self._device, self._dtype)
        recurrent, states = self._recurrent, self._states
        if recurrent is None or states is None:
            logits = self._forward(step)
        else:
            states.begin(requests)
            recurrent.start(step.state_rows(), states)
            try:
                logits = self._forward(step)
            finally:
                recurrent.finish()
            states.save(requests)
        sampled = [request for request in requests if request.samples]
        outputs = {}
        if sampled:
            rows = logits[0, :, : self._memory.vocab_size].float().contiguous()
            outputs = {output.request_id: output for output in sample(rows, sampled, self._edits)}
        return [outputs.get(r.request_id) or ExecuteOutput(r.request_id, None) for r in requests]

    def _forward(self, step: PackedStep) -> Tensor:
        """Logits [1, sampled rows, vocab]."""
        logits: Tensor = self._model(
            input_ids=step.tokens[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=step.sampled_rows,
            **{STEP_KEYWORD: PagedAttender(step, self._storage)},
        ).logits
        return logits


def _with_states(
    memory: MemoryInfo,
    options: TorchOptions,
    shapes: Mapping[int, LayerStates],
    free: int | None,
    device: torch.device,
) -> MemoryInfo:
    """``memory`` with the sizes of states; ``free``: bytes that the device has left."""
    size = state_bytes(shapes)
    snapshots = options.max_state_snapshots
    if snapshots is None:
        left = None if free is None else max(0, free - memory.max_slots * size)
        snapshots = default_snapshots(size, memory.kv_cache_bytes, left)
    return replace(
        memory,
        state_bytes=size,
        num_state_snapshots=snapshots,
        state_snapshot_interval=snapshot_interval(
            options.state_snapshot_interval_tokens, on_cpu=device.type == "cpu"
        ),
    )


def _context(options: TorchOptions, limit: int) -> int:
    if options.max_seq_len is None:
        return limit
    if options.max_seq_len > limit:
        raise ConfigurationError(
            f"max_seq_len: got {options.max_seq_len}; the model's context is {limit} tokens"
        )
    return options.max_seq_len


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() if device.type == "cpu" else None
