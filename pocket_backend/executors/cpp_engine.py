"""The executor of the C++ engine: the only module that imports ``pocket_cpp_core``, lazily.

It keeps a block table per slot in one numpy array, turns a step into the engine's packed form and
makes one native call, which releases the GIL while it computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pocket_backend.api import (
    BackendUnavailableError,
    ConfigurationError,
    EngineError,
    ModelLoadError,
    PocketLLMError,
    UnsupportedFeatureError,
)
from pocket_backend.api.errors import short_repr
from pocket_backend.core.step import ExecuteOutput, ExecuteRequest, MemoryInfo
from pocket_backend.executors.base import BackendExecutor
from pocket_backend.executors.cpp_options import CppEngineOptions
from pocket_backend.executors.cpp_prompt_logprobs import PromptScorer, read_logprobs
from pocket_backend.executors.cpp_sampling import SlotEdits
from pocket_backend.executors.cpp_states import SlotStates, pool_sizes
from pocket_backend.executors.cpp_step import StepArrays
from pocket_backend.executors.cpu_quota import quota_threads
from pocket_backend.executors.executor_options import BLOCK_SIZE
from pocket_backend.executors.memory import available_memory
from pocket_backend.text.gguf_files import gguf_model_file

if TYPE_CHECKING:
    from pocket_backend.api import BackendCapabilities, EngineArgs

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
        "bad_words",
        "logprobs",
        "prompt_logprobs",
    }
)
_NO_BLOCK = -1
_ROW_ERRORS = {
    -1: "the model's logits hold no usable value (NaN or infinity)",
    -2: "no token may come next: allowed_token_ids, bad_token_ids and min_tokens exclude all",
}


class CppEngineBackend(BackendExecutor):
    """A model on the CPU, from GGUF or safetensors.

    Args:
        ckpt: a GGUF file, a directory that holds exactly one, or a Hugging Face directory
            (config.json and safetensors).
        options: see ``CppEngineOptions``; unknown names are refused.

    Raises:
        ModelLoadError: the file is missing, malformed or of an unknown kind; the message is the
            engine's and names file, tensor or key.
        ConfigurationError: an option is out of range, or asks for more than the model allows.
        BackendUnavailableError: the native module or the instruction set is not there.
    """

    def __init__(
        self, ckpt: str | Path, options: Mapping[str, object] | CppEngineOptions | None = None
    ) -> None:
        if not isinstance(options, CppEngineOptions):
            options = CppEngineOptions.from_mapping(options or {})
        path = gguf_model_file(Path(ckpt).expanduser())
        native = _native_module()
        self._native = native
        try:
            info = native.inspect_model(path, kv_dtype=options.native_kv_dtype)
            context = _context(options, info["context"])
            sizes = pool_sizes(options, context, info, available_memory())
            self._engine = native.Engine(
                path,
                num_blocks=sizes.blocks,
                state_snapshots=sizes.snapshots,
                max_sequences=options.max_batch_size,
                max_batch_tokens=options.max_batch_tokens,
                max_context=context,
                kv_dtype=options.native_kv_dtype,
                precision=options.precision,
                threads=options.threads or quota_threads(),
                isa=options.isa,
                weights=None if options.weights == "auto" else options.weights,
            )
        except native.EngineError as error:
            raise _load_error(error) from error
        self.model_info: Mapping[str, Any] = self._engine.model_info
        tokens = self.model_info["tokenizer_tokens"] or self.model_info["vocab"]
        self._memory = MemoryInfo(
            num_blocks=sizes.blocks,
            block_size=BLOCK_SIZE,
            max_slots=options.max_batch_size,
            max_context=context,
            max_batch_tokens=options.max_batch_tokens,
            vocab_size=min(tokens, self.model_info["vocab"]),
            kv_cache_bytes=self._engine.kv_cache_bytes,
            weight_bytes=self.model_info["weight_bytes"],
            workspace_bytes=self._engine.workspace_bytes,
            state_bytes=self.model_info["state_bytes"],
            num_state_snapshots=sizes.snapshots,
            state_snapshot_interval=sizes.snapshot_interval,
        )
        self._states = SlotStates(native, self._engine) if self._memory.state_bytes else None
        self._tables = np.full(
            (options.max_batch_size, -(-context // BLOCK_SIZE)), _NO_BLOCK, dtype=np.int32
        )
        self._owners: list[str | None] = [None] * options.max_batch_size
        self._block_counts = [0] * options.max_batch_size
        self._edits = SlotEdits(
            native, options.max_batch_size, self.model_info["vocab"], self._memory.vocab_size
        )
        self._scorer = PromptScorer(self._memory.vocab_size)
        self._step = StepArrays(
            options.max_batch_size,
            options.max_batch_tokens,
            context,
            {"block_tables": self._tables, "sample_vocab": self._memory.vocab_size},
        )

    @classmethod
    def from_args(cls, args: EngineArgs) -> CppEngineBackend:
        """Build from ``EngineArgs``; ``backend_options`` go to ``CppEngineOptions`` as well.

        Raises:
            UnsupportedFeatureError: a ``device`` or ``dtype`` that is not the CPU's.
        """
        if args.device not in ("auto", "cpu"):
            raise UnsupportedFeatureError(
                f"device {args.device!r}", "the C++ engine runs on the CPU", field="device"
            )
        if args.dtype != "auto":
            raise UnsupportedFeatureError(
                f"dtype {args.dtype!r}",
                "the C++ engine computes as precision says, with the file's weights",
                field="dtype",
            )
        options: dict[str, object] = {
            "max_batch_size": args.max_batch_size,
            "max_seq_len": args.max_model_len,
            "max_batch_tokens": args.max_num_batched_tokens,
            "kv_cache_dtype": args.kv_cache_dtype,
            "precision": args.precision,
            "threads": args.threads,
        }
        if args.kv_cache_tokens is not None:
            options["kv_cache_tokens"] = args.kv_cache_tokens
        options |= args.backend_options
        return cls(args.model_path(), options)

    def get_memory_info(self) -> MemoryInfo:
        return self._memory

    def supports_feature(self, feature: str) -> bool:
        if feature == "recurrent_state":
            return self._states is not None
        if feature == "block_copies" and self._states is not None:
            return False  # a copied block comes without the state that goes with it
        return feature in _FEATURES

    @property
    def capabilities(self) -> BackendCapabilities:
        return replace(
            super().capabilities,
            name="cpp",
            models=tuple(self._native.registered_architectures()),
            model_formats=("gguf", "safetensors"),
            devices=("cpu",),
            details={"isa": self.isa, "kv_dtype": self.kv_dtype},
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that the file's tokenizer names as ends of a text."""
        return frozenset(self.model_info["eos_token_ids"])

    def reset_slot(self, slot_id: int) -> None:
        if not 0 <= slot_id < len(self._owners):
            raise EngineError(f"slot_id: got {slot_id}; must be below {len(self._owners)}")
        self._set_table(slot_id, None, ())
        self._step.forget()
        self._edits.drop(slot_id)
        self._scorer.drop(slot_id)

    def close(self) -> None:
        self._engine.close()

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self._engine.isa)

    @property
    def kv_dtype(self) -> str:
        """How keys and values are stored: f32, f16, bf16 or i8."""
        return str(self._engine.kv_dtype)

    def execute_model(self, requests: Sequence[ExecuteRequest]) -> Sequence[ExecuteOutput]:
        """See ``BackendExecutor``. Makes one native call, and one more each if blocks are copied,
        and recurrent states loaded or saved.
        """
        if not requests:
            return []
        sampled = [request for request in requests if request.samples]
        arrays = self._step.again(requests)
        if arrays is None:
            self._check_step(requests)
            self._copy_blocks(requests)
            arrays = self._step.fill(requests, sampled)
        if self._states is not None:
            self._states.load(requests)
        for request in requests:
            if request.is_new:
                self._set_table(request.slot_id, request.request_id, request.block_ids)
                self._edits.start(request)
                self._scorer.start(request)
            elif request.block_ids:
                self._append_blocks(request.slot_id, request.block_ids)
        arguments: dict[str, Any] = arrays
        edits = self._edits.rows(requests, sampled)
        scored: Sequence[tuple[int, int, int]] = ()
        if edits or self._scorer.active:
            arguments = {**arrays, **edits}
            scored = self._scorer.add_rows(requests, len(sampled), arguments)
        try:
            tokens, *logprobs = self._engine.step(**arguments)
        except self._native.EngineError as error:
            raise EngineError(f"step of {len(requests)} sequences: {error}") from error
        if self._states is not None:
            self._states.save(requests)
        self._step.ran()
        outputs = _outputs(requests, tokens.tolist(), logprobs)
        for index, row, count in scored:
            top = requests[index].sampling_params.prompt_logprobs or 0
            found = tuple([read_logprobs(logprobs, i, top) for i in range(row, row + count)])
            outputs[index] = replace(outputs[index], prompt_logprobs=found)
        return outputs

    def _check_step(self, requests: Sequence[ExecuteRequest]) -> None:
        """What arrays and tables rely on; the engine checks all else before it computes. A step
        that goes on with the last one (``StepArrays.again``) passes by construction."""
        slots = {request.slot_id for request in requests}
        if len(slots) != len(requests) or min(slots) < 0 or max(slots) >= len(self._owners):
            raise EngineError(
                f"slots {short_repr(sorted(r.slot_id for r in requests))} are repeated or not "
                f"from 0 to {len(self._owners) - 1}"
            )
        tokens = sum([len(request.token_ids) for request in requests])
        if tokens > self._memory.max_batch_tokens:
            raise EngineError(
                f"step of {tokens} tokens; at most {self._memory.max_batch_tokens} are allowed"
            )
        for request in requests:
            if not request.is_new and self._owners[request.slot_id] != request.request_id:
                raise EngineError(
                    f"slot {request.slot_id} does not hold request {request.request_id!r}"
                )
            end = request.start_position + len(request.token_ids)
            if request.start_position < 0 or end > self._memory.max_context:
                raise EngineError(
                    f"request {request.request_id!r}: positions {request.start_position} to "
                    f"{end - 1} are not inside the context of {self._memory.max_context}"
                )

    def _copy_blocks(self, requests: Sequence[ExecuteRequest]) -> None:
        pairs = [pair for request in requests for pair in request.block_copies]
        if not pairs:
            return
        array = np.array(pairs, dtype=np.int32)
        try:
            self._engine.copy_blocks(array[:, 0].copy(), array[:, 1].copy())
        except self._native.EngineError as error:
            raise EngineError(str(error)) from error

    def _set_table(self, slot: int, owner: str | None, blocks: Sequence[int]) -> None:
        self._tables[slot, : self._block_counts[slot]] = _NO_BLOCK
        self._block_counts[slot] = 0
        self._owners[slot] = owner
        if blocks:
            self._append_blocks(slot, blocks)

    def _append_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        begin = self._block_counts[slot]
        end = begin + len(blocks)
        if end > self._tables.shape[1]:
            raise EngineError(
                f"slot {slot}: {end} blocks; a context of {self._memory.max_context} tokens has "
                f"{self._tables.shape[1]}"
            )
        self._tables[slot, begin:end] = blocks
        self._block_counts[slot] = end


def kernel_isa() -> str:
    """Instruction set of the kernels that this machine gets, such as ``avx512``.

    Raises:
        BackendUnavailableError: the engine is not built.
    """
    return str(_native_module().build_info()["isa"])


def inspect_model(ckpt: str | Path, kv_cache_dtype: str = "auto") -> Mapping[str, Any]:
    """The engine's ``model_info`` of a model, without loading its weights.

    Raises:
        ModelLoadError, ConfigurationError, BackendUnavailableError: as ``CppEngineBackend``.
    """
    options = CppEngineOptions(kv_cache_dtype=kv_cache_dtype)
    native = _native_module()
    try:
        info: Mapping[str, Any] = native.inspect_model(
            gguf_model_file(Path(ckpt).expanduser()), kv_dtype=options.native_kv_dtype
        )
    except native.EngineError as error:
        raise _load_error(error) from error
    return info


def unsupported_reason(ckpt: str | Path) -> str | None:
    """Why the C++ engine cannot run a well-formed model here: architecture, format, no native
    module. None if it can, and for a missing or damaged model, about which it has more to say.
    """
    try:
        native = _native_module()
    except BackendUnavailableError as error:
        return str(error)
    try:
        native.inspect_model(gguf_model_file(Path(ckpt).expanduser()))
    except native.EngineError as error:
        return str(error) if error.code == "unsupported" else None
    except ModelLoadError:
        return None
    return None


def _outputs(
    requests: Sequence[ExecuteRequest],
    tokens: Sequence[int],
    logprobs: Sequence[np.ndarray[Any, Any]],
) -> list[ExecuteOutput]:
    """``logprobs``: [R], and, if a row asked, ids [R, 20] and their values."""
    asked = len(logprobs) > 1
    outputs = []
    row = 0
    for request in requests:
        if not request.samples:
            outputs.append(ExecuteOutput(request.request_id, None))
            continue
        token = tokens[row]
        output = ExecuteOutput(request.request_id, token)
        if token < 0:
            output.token_id, output.finish_reason = None, "error"
            output.error = _ROW_ERRORS[token]
        elif asked and (count := request.sampling_params.logprobs) is not None:
            output.logprobs = read_logprobs(logprobs, row, count)
        outputs.append(output)
        row += 1
    return outputs


def _native_module() -> Any:
    try:
        return importlib.import_module("pocket_cpp_core")
    except ImportError as error:
        raise BackendUnavailableError(
            f"the native module pocket_cpp_core cannot be imported ({error}); build it with "
            "`pip install .` from the project's folder"
        ) from error


def _context(options: CppEngineOptions, limit: int) -> int:
    if options.max_seq_len is None:
        return limit
    if options.max_seq_len > limit:
        raise ConfigurationError(
            f"max_seq_len: got {options.max_seq_len}; the model's context is {limit} tokens"
        )
    return options.max_seq_len


def _load_error(error: Any) -> PocketLLMError:
    message = str(error)
    if error.code in ("invalid_argument", "resource_exhausted"):
        return ConfigurationError(message)
    return ModelLoadError(message)
