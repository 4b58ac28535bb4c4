"""What a model is, from its files' headers: nothing here loads a weight.

`describe_model` reads a GGUF file (all parts of a split one) or a Hugging Face directory with
safetensors. It describes what the files say, not what a backend makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pocket_backend.api.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """The tensors of one storage format."""

    name: str
    tensors: int
    parameters: int
    bytes: int | None
    """None: a format whose size this version does not know."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; None where the files do not say."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: tuple[int, ...] = ()
    """One entry for all layers, or one each."""
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    context: int | None = None
    experts: int | None = None
    experts_used: int | None = None
    """By each token."""
    sliding_window: int | None = None

    def kv_bytes_per_token(self, element_bytes: int) -> int | None:
        """Keys and values of one position in all layers, stored plainly; None if unknown.

        Layers without such a cache (recurrent ones) are not told apart, so for hybrid models this
        is an upper bound.
        """
        if not (self.layers and self.kv_heads and self.head_dim):
            return None
        each = self.kv_heads * self.layers if len(self.kv_heads) == 1 else self.kv_heads
        return 2 * sum(each) * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class TokenizerSummary:
    """What the files say about text."""

    kind: str
    """Such as ``BPE (smollm)``; empty if there is none."""
    tokens: int | None = None
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """See ``describe_model``."""

    path: Path
    container: str
    """``GGUF v3`` or ``safetensors``."""
    files: int
    architecture: str
    name: str | None
    shape: Shape
    formats: tuple[TensorFormat, ...]
    """Largest first."""
    tokenizer: TokenizerSummary
    expert_parameters: int = 0
    """Of the experts that tokens choose from."""

    @property
    def active_parameters(self) -> int:
        """What one token uses: of the experts, as many as it chooses."""
        if not self.shape.experts or not self.shape.experts_used:
            return self.parameters
        unused = self.shape.experts - min(self.shape.experts_used, self.shape.experts)
        return self.parameters - self.expert_parameters * unused // self.shape.experts

    @property
    def parameters(self) -> int:
        return sum(item.parameters for item in self.formats)

    @property
    def tensors(self) -> int:
        return sum(item.tensors for item in self.formats)

    @property
    def weight_bytes(self) -> int | None:
        sizes = [item.bytes for item in self.formats]
        return None if None in sizes else sum(size for size in sizes if size is not None)


def describe_model(model: str | Path) -> ModelDescription:
    """Describe a GGUF file, or a directory that holds one GGUF model or safetensors.

    Raises:
        ModelLoadError: missing, damaged, of an unknown kind, or several models in one directory;
            names the file and what is wrong with it.
    """
    from pocket_backend.executors.checkpoint_description import describe_checkpoint
    from pocket_backend.executors.gguf_description import describe_gguf
    from pocket_backend.text.gguf_files import gguf_models, only_gguf_model

    path = Path(model).expanduser()
    if not path.exists():
        raise ModelLoadError(f"model: {path} does not exist; give a GGUF file or a model directory")
    if not path.is_dir():
        if path.suffix == ".safetensors":
            raise ModelLoadError(f"model: {path.name} is one file of a model; give its directory")
        return describe_gguf(path)
    if (path / "config.json").is_file() or not gguf_models(path):
        return describe_checkpoint(path)
    return describe_gguf(only_gguf_model(path))


def count_experts(tensors: Iterable[tuple[str, Sequence[int]]]) -> int:
    """Parameters, by (name, shape), of experts that tokens choose from: in GGUF's stacks
    (``ffn_up_exps``), Hugging Face's, or one by one (``mlp.experts.7.up_proj``)."""
    return sum(prod(shape) for name, shape in tensors if "_exps." in name or ".experts." in name)


def by_format(
    tensors: Iterable[tuple[str, Sequence[int], int | None]],
) -> tuple[TensorFormat, ...]:
    """Add up (format, shape, bytes) of tensors."""
    groups: dict[str, TensorFormat] = {}
    for name, shape, size in tensors:
        old = groups.get(name, TensorFormat(name, 0, 0, 0))
        total = None if old.bytes is None or size is None else old.bytes + size
        groups[name] = TensorFormat(name, old.tensors + 1, old.parameters + prod(shape), total)
    return tuple(sorted(groups.values(), key=lambda item: -item.parameters))
