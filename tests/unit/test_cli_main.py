"""Arguments, exit codes and messages of the `pocketllm` command; no server is started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import TinyLlama, write_gguf

from pocket_backend.api import ConfigurationError
from pocket_backend.cli import doctor, gateway, main, options
from pocket_backend.cli.examples import examples
from pocket_backend.triton.launcher import ServerOptions, TritonServer
from pocket_backend.triton.ports import Ports


def options_of(*argv: str) -> ServerOptions:
    return main.server_options(main._parser().parse_args(argv))


def test_defaults_serve_on_localhost() -> None:
    options = options_of("serve", "model.gguf")
    assert (options.model, options.host, options.ports) == ("model.gguf", "127.0.0.1", Ports())
    assert options.environment == {}


def test_engine_options_travel_as_environment() -> None:
    options = options_of(
        "demo", "--model", "m", "--threads", "3", "--kv-cache-tokens", "64", "--http-port", "0"
    )
    assert options.environment == {"POCKETLLM_THREADS": "3", "POCKETLLM_KV_CACHE_TOKENS": "64"}
    assert options.ports.http == 0


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["demo", "--once", "--model", "/nowhere.gguf"], 3, "error: model: /nowhere.gguf does not"),
        (["serve", "/"], 3, "error: model: the directory / holds neither"),
        (["serve", "fake", "--http-port", "99999"], 1, "error: --http-port: got 99999"),
        (["serve", "fake", "--grpc-port", "8000"], 1, "error: ports 8000, 8000, 8002"),
    ],
)
def test_errors_are_one_sentence_and_a_status(
    argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(argv) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1


def test_usage_errors_are_status_two() -> None:
    for argv in ([], ["fly"], ["serve", "--http-port", "x"]):
        with pytest.raises(SystemExit) as ended:
            main.main(argv)
        assert ended.value.code == 2


def test_no_model_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocket_backend.triton.settings.find_default_model", lambda: None)
    with pytest.raises(ConfigurationError, match="no model given and no demo model installed"):
        options.model_path(None)
    monkeypatch.setenv("POCKETLLM_MODEL", "/models/a.gguf")
    assert options.model_path(None) == "/models/a.gguf"
    assert options.model_path("b.gguf") == "b.gguf"


def test_interrupt_is_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "_doctor", interrupted)
    assert main.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_doctor_reports_every_line_and_fails_on_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.doctor("/nowhere.gguf") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == [
        line for line in lines if "/nowhere.gguf does not exist" in line
    ]
    assert len(lines) == 14


def test_doctor_says_who_serves_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny.gguf"
    write_gguf(model, TinyLlama(layers=1))
    assert doctor.doctor(str(model)) == 0
    assert "served by cpp: the C++ engine knows" in capsys.readouterr().out
    monkeypatch.setattr("pocket_backend.executors.memory.available_memory", lambda: 1)
    assert doctor.doctor(str(model)) == 1
    assert "0 MiB of memory are available: free some" in capsys.readouterr().out
    model.write_bytes(b"GGUF and nothing else")
    assert doctor.doctor(str(model)) == 1


def test_doctor_notes_what_is_in_use_or_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "_PORTS", Ports(port, 0, 0))
        monkeypatch.setitem(doctor._EXTRAS, "gateway", ("no_such_package",))
        assert doctor.doctor("fake") == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert any(f"port {port} on 127.0.0.1 is already in use" in line for line in notes)
    assert any("no_such_package not installed: pip install 'pocketllm[gateway]'" in line
               for line in notes)  # fmt: skip


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor("/nowhere.gguf", as_json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    verdicts = {item["name"]: item["verdict"] for item in report["checks"]}
    assert verdicts["model"] == "fail"
    assert verdicts["numpy"] == "ok"
    (model,) = (item for item in report["checks"] if item["name"] == "model")
    assert "/nowhere.gguf" in model["detail"]


def test_a_gateway_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "PACKAGES", ("json", "no_such_package"))
    with pytest.raises(ConfigurationError, match=r"needs no_such_package: pip install 'pocketllm"):
        gateway.GatewayProcess("127.0.0.1:1", host="127.0.0.1", port=0)


def test_examples_hold_the_servers_addresses() -> None:
    server = TritonServer(ServerOptions("fake", ports=Ports(1234, 1235, 1236)))
    text = examples(server)
    assert "http://127.0.0.1:1234/v2/models/pocketllm/generate_stream" in text
    assert 'InferenceServerClient("127.0.0.1:1235")' in text


def test_the_command_is_light_to_import() -> None:
    """`pocketllm --help` loads neither torch nor the engine nor numpy."""
    code = (
        "import sys; from pocket_backend.cli.main import main\n"
        "heavy = {'torch', 'numpy', 'pocket_cpp_core', 'tritonclient', 'grpc'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)
