"""Which packages Transformers needs to read a quantised checkpoint, and which of them are missing.

Transformers finds that out itself, but late and in many words; and a method that it does not know
it skips with a warning, so that the packed numbers would be served as if they were weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping

from pocket_backend.api import BackendUnavailableError, ModelLoadError
from pocket_backend.api.errors import short_repr

PACKAGES = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "bitsandbytes_4bit": ("bitsandbytes",),
    "bitsandbytes_8bit": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels",),
    "fbgemm_fp8": ("fbgemm_gpu",),
    "fouroversix": ("fouroversix",),
    "fp_quant": ("fp_quant",),
    "gptq": ("optimum", "gptqmodel"),
    "higgs": ("flute", "fast_hadamard_transform"),
    "hqq": ("hqq",),
    "quanto": ("optimum.quanto",),
    "quark": ("quark",),
    "sinq": ("sinq",),
    "spqr": ("spqr_quant",),
    "torchao": ("torchao",),
    "vptq": ("vptq",),
}
"""Modules by method. Methods that are not here need none (``fp8``, say)."""


def quantisation_method(config: Mapping[str, object]) -> str | None:
    """The method that a checkpoint's ``config.json`` names; None: it is not quantised.

    Raises:
        ModelLoadError: there is a ``quantization_config`` and it names none.
    """
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        found = place.get("quantization_config")
        if not isinstance(found, Mapping) or not found:
            continue
        for width in ("4bit", "8bit"):  # they name the method only in newer files
            if found.get(f"load_in_{width}"):
                return f"bitsandbytes_{width}"
        method = found.get("quant_method")
        if not isinstance(method, str):
            raise ModelLoadError(
                f"model: quantization_config of config.json names no quant_method, but "
                f"{short_repr(method)}"
            )
        return method
    return None


def check_quantisation(config: Mapping[str, object], known: Collection[str]) -> None:
    """Refuse what cannot be read here.

    Args:
        config: content of ``config.json``.
        known: the methods of the installed Transformers.

    Raises:
        BackendUnavailableError: names the packages that are missing.
        ModelLoadError: the method is none that Transformers knows.
    """
    method = quantisation_method(config)
    if method is None:
        return
    missing = [package for package in PACKAGES.get(method, ()) if not _is_installed(package)]
    if missing:
        raise BackendUnavailableError(
            f"model: the checkpoint is quantised ({method}) and Transformers needs the "
            f"package{'s' if len(missing) > 1 else ''} {' and '.join(missing)} to read it; install "
            "that, or use a checkpoint that is not quantised"
        )
    if method not in known:
        raise ModelLoadError(
            f"model: the checkpoint is quantised by {short_repr(method)}, which Transformers does "
            f"not know; it knows {', '.join(sorted(known))}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
