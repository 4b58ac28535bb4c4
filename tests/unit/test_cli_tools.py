"""`pocketllm models`, `bench` and `completion`."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from cli_sessions import ScriptedSession, use_session
from safetensors.numpy import save_file
from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import EngineError, OverloadedError
from pocket_backend.cli import bench
from pocket_backend.cli.main import main

# --- models ---------------------------------------------------------------------------------------


def test_models_of_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "b.gguf", TinyLlama(layers=1))
    (tmp_path / "broken.gguf").write_bytes(b"no")
    (tmp_path / ".hidden").mkdir()
    write_gguf(tmp_path / ".hidden" / "c.gguf", TinyLlama(layers=1))
    deep = tmp_path / "1" / "2" / "3" / "4" / "5"
    deep.mkdir(parents=True)
    write_gguf(deep / "too_deep.gguf", TinyLlama(layers=1))
    checkpoint = tmp_path / "1" / "hf"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.zeros(4, np.float32)}, checkpoint / "model.safetensors")
    assert main(["models", "--json", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {Path(row["path"]).name: row for row in rows if str(tmp_path) in row["path"]}
    assert list(found) == ["b.gguf", "broken.gguf", "hf"]
    assert found["b.gguf"]["formats"] == "F32"
    assert found["hf"]["parameters"] == 4
    assert "is not a GGUF file" in found["broken.gguf"]["error"]
    assert main(["models", str(tmp_path / "nowhere")]) == 2


@pytest.fixture
def web() -> Iterator[Callable[[dict[str, object]], str]]:
    """Serves JSON by path on loopback; anything else is 404."""
    servers: list[ThreadingHTTPServer] = []

    def serve(answers: dict[str, object]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path in answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(answers.get(self.path)).encode())

            do_POST = do_GET  # noqa: N815  (the library's name)

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def test_models_of_a_server(
    web: Callable[[dict[str, object]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = web({"/v1/models": {"data": [{"id": "pocketllm"}]}})
    assert main(["models", "--url", f"{gateway}/v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"id": "pocketllm", "state": "READY"}]
    triton = web(
        {"/v2/repository/index": [{"name": "generator", "version": "1", "state": "READY"}]}
    )
    assert main(["models", "--url", triton]) == 0
    assert capsys.readouterr().out == "generator  1  READY\n"
    assert main(["models", "--url", web({})]) == 1
    assert "is neither a gateway nor a Triton server" in capsys.readouterr().err
    assert main(["models", "--url", web({"/v1/models": {"data": [3]}})]) == 1
    assert main(["models", "--url", "http://127.0.0.1:1"]) == 4
    assert main(["models", "--url", "127.0.0.1:8001"]) == 2


# --- bench ----------------------------------------------------------------------------------------


def test_bench_runs_each_load_on_a_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "fake", "--concurrency", "1,3", "--requests", "5", "--json"]
    assert main([*argv, "--prompt-tokens", "20", "-n", "4"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["concurrency"] for record in records} == {1, 3}
    assert {record["metric"] for record in records} == {
        "output_tokens_per_second",
        "total_tokens_per_second",
        "ttft_p50_seconds",
        "ttft_p99_seconds",
        "inter_token_p50_seconds",
        "inter_token_p99_seconds",
    }
    keys = {"bench", "engine", "workload", "concurrency", "metric", "value", "unit", "samples"}
    assert all(set(record) == keys and record["value"] > 0 for record in records)
    assert main([*argv[:-1], "-n", "2"]) == 0
    assert "streams requests" in capsys.readouterr().out


def test_bench_sends_what_it_says_and_no_more_at_a_time() -> None:
    at_once: list[int] = []
    gate = threading.Barrier(3)
    active = threading.Semaphore(3)

    class Counting(ScriptedSession):
        def ask(self, prompt, sampling, on_piece):  # type: ignore[no-untyped-def]
            assert active.acquire(blocking=False), "more than three at a time"
            gate.wait(20)  # breaks unless three are open at a time
            at_once.append(len(prompt.token_ids))
            try:
                return super().ask(prompt, sampling, on_piece)
            finally:
                active.release()

    session = Counting()
    row = bench.measure(session, bench.Load(3, 9, 50, 2), random.Random(0))
    assert at_once == [50] * 9
    assert len({tuple(prompt.token_ids or ()) for prompt, _ in session.asked}) == 9
    assert session.asked[0][1] == {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    assert row.output_tokens_per_second == pytest.approx(18 / row.seconds)
    assert row.ttfts == [0.25] * 9
    assert row.inter_token_seconds == [0.5] * 9


def test_bench_stops_at_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ScriptedSession(lambda n: [OverloadedError("full")] if n == 2 else ["a"])
    use_session(monkeypatch, session, bench)
    assert main(["bench", "--concurrency", "1", "--requests", "50"]) == 4
    assert "error: full" in capsys.readouterr().err
    assert len(session.asked) == 3
    failing = ScriptedSession(lambda _n: [EngineError("x")])
    with pytest.raises(EngineError):
        bench.measure(failing, bench.Load(2, 4, 5, 1), random.Random(0))


@pytest.mark.parametrize("argv", [["--concurrency", "0"], ["--concurrency", "a"], ["-n", "0"]])
def test_bench_refuses(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fake", *argv]) == 2
    assert argv[0].lstrip("-")[0] in capsys.readouterr().err


def test_quantiles() -> None:
    assert bench.quantile([3.0], 99) == 3.0
    assert bench.quantile([0.0, 1.0, 2.0], 50) == 1.0
    assert bench.quantile([0.0, 100.0], 99) == pytest.approx(99.0)


# --- completion -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pocketllm", "in"], ["inspect"]),
        (["pocketllm", "run", "--temp"], ["--temperature", "--temp"]),
        (["pocketllm", "chat", "--sys"], ["--system"]),
        (["pocketllm", "completion", "z"], ["zsh"]),
        (["pocketllm", "run", "--file", ""], []),
        (["pocketllm", "nonsense", "-"], []),
    ],
)
def test_bash_completes(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    call = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", f'{script}\n{call}_pocketllm\nprintf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert sorted(done.stdout.split()) == sorted(expected)
    assert done.stderr == ""


def test_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    """Their shells may not be here; what can be held is that every option is in the script."""
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert "'__fish_seen_subcommand_from run' -l temperature -r" in fish
    assert "'__fish_seen_subcommand_from run' -l raw\n" in fish
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit")
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
