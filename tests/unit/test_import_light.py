"""``import pocket_backend`` and the value types load nothing heavy; names resolve on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pocket_cpp_core", "numpy", "tokenizers", "asyncio")


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import pocket_backend",
        "from pocket_backend import EngineArgs, SamplingParams",
        "from pocketllm import EngineArgs, SamplingParams",
        "import pocket_backend.observability.logging, pocket_backend.observability.names",
        "import pocket_backend.executors.registry",
        "import pocket_backend.engine.unified",
    ],
)
def test_import_is_light(statement: str) -> None:
    assert not _loaded_after(statement).intersection(HEAVY)


def test_heavy_names_are_those_that_would_be_seen() -> None:
    assert "numpy" in _loaded_after("import numpy")


def test_lazy_names_resolve() -> None:
    import pocket_backend
    from pocket_backend.engine.llm import LLM

    assert pocket_backend.LLM is LLM
    assert set(pocket_backend.__all__) <= set(dir(pocket_backend))
    with pytest.raises(AttributeError, match="no_such_name"):
        pocket_backend.no_such_name  # noqa: B018
