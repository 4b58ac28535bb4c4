"""Start, stop, failures, interruption, reload: nothing is left behind and reasons are clear."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton_clients import (
    at_baseline,
    control,
    generate,
    generate_stream,
    grpc_stream,
    processes_mentioning,
    wait_for,
)
from triton_models import load_all, unload_all

from pocket_backend.triton.installation import find_libpython_dirs, find_triton
from pocket_backend.triton.launcher import (
    ServerOptions,
    TritonServer,
    build_backend_directory,
    find_model_repository,
)
from pocket_backend.triton.ports import Ports, resolve
from pocket_backend.triton.shm import SHM_DIR

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("tokenizer", "generator", "detokenizer")
FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


def left_of(server_id: str) -> list[str]:
    """Processes, shared memory and directories that carry this server's id."""
    return [
        *processes_mentioning(server_id),
        *map(str, SHM_DIR.glob(f"*{server_id}*")),
        *map(str, Path(tempfile.gettempdir()).glob(f"*{server_id}*")),
    ]


class Command:
    """`pocketllm ARGS` as a child process in a process group of its own."""

    def __init__(self, *argv: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pocket_backend.cli.main", *argv],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for_server(self) -> str:
        """The id of its server, once that process exists."""
        wait_for(lambda: self._server_ids() != [], what="server started")
        return self._server_ids()[0]

    def guardian(self) -> int:
        (pid,) = children_of(self.process.pid)
        return pid

    def _server_ids(self) -> list[str]:
        servers = [pid for child in children_of(self.process.pid) for pid in children_of(child)]
        texts = [command_line(pid) for pid in servers]
        return [match[1] for text in texts if (match := re.search(r"pocketllm-(\w{12})-", text))]

    def output(self, timeout: float = 120) -> str:
        return self.process.communicate(timeout=timeout)[0]


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children_of(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found


def run(*argv: str, timeout: float = 120) -> tuple[int, str]:
    command = Command(*argv)
    output = command.output(timeout)
    return command.process.returncode, output


def test_demo_once_answers_and_ends(model_path: str) -> None:
    """What `make run ONCE=1` runs."""
    status, output = run("demo", "--once", *FREE)
    assert status == 0, output
    assert "The capital of France is Paris." in output
    assert re.search(r"first token after \d+ ms, then \d+ tokens/s", output)


def test_examples_work_as_printed(server: TritonServer) -> None:
    """Paste each of them into a shell."""
    from pocket_backend.cli.examples import examples

    blocks = re.split(r"^--- .*\n", examples(server), flags=re.MULTILINE)[1:]
    assert len(blocks) == 4
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks:
        done = subprocess.run(
            ["bash", "-ec", block],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PATH": path},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert '"error"' not in done.stdout
        assert len(done.stdout) > 20


def test_two_servers_at_once(server: TritonServer, fake_server: TritonServer) -> None:
    """X3: different ports, different shared-memory prefixes, no crosstalk under load."""
    text = {"text_input": "The capital of France is", "max_tokens": 24}
    expected = generate(server.http_url, text).text
    fake = {"text_input": "abc", "max_tokens": 24}
    expected_fake = generate(fake_server.http_url, fake).text
    with ThreadPoolExecutor(8) as pool:
        real = [pool.submit(generate_stream, server.http_url, text) for _ in range(8)]
        other = [pool.submit(generate_stream, fake_server.http_url, fake) for _ in range(8)]
        assert {future.result().text for future in real} == {expected}
        assert {future.result().text for future in other} == {expected_fake}


@pytest.mark.parametrize("delay", [0.0, 0.3, 1.2, 2.5])
def test_ctrl_c_during_start_up_leaves_nothing(delay: float) -> None:
    command = Command("serve", "fake", *FREE)
    server_id = command.wait_for_server()
    time.sleep(delay)
    os.killpg(command.process.pid, signal.SIGINT)  # the terminal signals the whole group
    output = command.output()
    # It may have been serving already: then Ctrl-C is the usual end.
    assert command.process.returncode == (0 if "serving" in output else 130), output
    assert left_of(server_id) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_while_serving_ends_cleanly(number: signal.Signals) -> None:
    command = Command("serve", "fake", *FREE)
    server_id = command.wait_for_server()
    assert command.process.stdout is not None
    lines = iter(command.process.stdout.readline, "")
    assert any("serving; Ctrl-C stops" in line for line in lines)
    os.kill(command.process.pid, number)
    assert command.process.wait(120) == 0
    command.process.stdout.close()
    assert left_of(server_id) == []


def test_killed_launcher_takes_its_server_along() -> None:
    command = Command("serve", "fake", *FREE)
    server_id = command.wait_for_server()
    time.sleep(2.0)
    command.process.kill()
    command.output()
    wait_for(lambda: left_of(server_id) == [], what="everything of the server gone")


def test_server_that_dies_is_reported() -> None:
    command = Command("serve", "fake", "--max-restarts", "0", *FREE)
    server_id = command.wait_for_server()
    (server,) = children_of(command.guardian())
    assert command.process.stdout is not None
    lines = iter(command.process.stdout.readline, "")
    seen = list(itertools.takewhile(lambda line: "serving; Ctrl-C stops" not in line, lines))
    assert command.process.poll() is None, "".join(seen)
    os.kill(server, signal.SIGKILL)
    rest = "".join(lines)
    assert command.process.wait(120) == 1
    command.process.stdout.close()
    assert "error: the server ended by itself; its log says:" in rest
    assert left_of(server_id) == []


def test_t4_start_cleans_what_a_killed_guardian_left(fake_server: TritonServer) -> None:
    """T4: shared memory and stubs of a dead server go; a living one's stay."""
    command = Command("serve", "fake", *FREE)
    server_id = command.wait_for_server()
    wait_for(lambda: len(list(SHM_DIR.glob(f"*{server_id}*"))) > 3, what="stubs started")
    guardian = command.guardian()
    os.kill(guardian, signal.SIGKILL)
    command.process.kill()
    command.output()
    wait_for(lambda: not Path(f"/proc/{guardian}/stat").exists() or "Z" in state_of(guardian))
    with TritonServer(ServerOptions("fake", ports=Ports(0, 0, 0))) as after:
        assert generate(after.http_url, {"text_input": "x", "max_tokens": 1}).error is None
        wait_for(lambda: left_of(server_id) == [], what="killed stubs gone")
    assert generate(fake_server.http_url, {"text_input": "x", "max_tokens": 1}).error is None


@pytest.fixture(scope="module")
def broken_models(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("broken")
    data = Path(model_path).read_bytes()
    key = b"general.architecture"
    at = data.index(key) + len(key) + 4 + 8  # past the value's type and length
    assert data[at : at + 5] == b"llama"
    contents = {
        "truncated": data[: len(data) // 2],
        "header only": data[:64],
        "unknown architecture": data[:at] + b"zebra" + data[at + 5 :],
        "not a model": b"#!/bin/sh\n" * 100,
        "empty": b"",
    }
    made = {}
    for name, content in contents.items():
        made[name] = folder / f"{name.replace(' ', '-')}.gguf"
        made[name].write_bytes(content)
    return made


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", r"truncated|bytes|beyond"),
        ("header only", r"fit into the file|truncated"),
        ("unknown architecture", r"architecture.*zebra|zebra.*architecture"),
        ("not a model", r"not a GGUF file"),
        ("empty", r"not a GGUF file|empty"),
    ],
)
def test_models_that_cannot_be_served(
    broken_models: dict[str, Path], kind: str, message: str
) -> None:
    status, output = run("serve", str(broken_models[kind]), *FREE)  # ends long before a timeout
    assert status == 3, output
    error = output[output.index("error: ") :].strip()
    assert re.search(message, error), error
    assert "\n" not in error
    assert "Traceback" not in output


def test_unknown_file_and_port_in_use() -> None:
    status, output = run("serve", "/nowhere.gguf", *FREE)
    assert status == 3
    assert output.endswith(
        "error: model: /nowhere.gguf does not exist; give a GGUF file or a Hugging Face directory\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        status, output = run("serve", "fake", *FREE[2:], "--http-port", str(port))
    assert status == 1
    assert f"port {port} on 127.0.0.1 is already in use" in output


def test_unload_and_reload_after_streaming(fake_server: TritonServer) -> None:
    """T7: unloading finishes, and the model comes back, time after time."""
    body = {"text_input": "abc", "max_tokens": 12}
    expected = generate(fake_server.http_url, body).text
    for _ in range(2):
        assert generate_stream(fake_server.http_url, body).text == expected
        assert grpc_stream(fake_server.grpc_address, body).text == expected
        unload_all(fake_server)
        load_all(fake_server)
        assert generate(fake_server.http_url, body).text == expected
    wait_for(lambda: at_baseline(control(fake_server.http_url, {"stats": True})), what="baseline")


def test_metrics(fresh_server: TritonServer) -> None:
    """M3: every series exists, counters grow by what was served (within a second or so)."""

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(fresh_server.metrics_url, timeout=60) as answer:
            text = answer.read().decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("pocket_")]
        return {name: float(value) for name, value in lines}

    def wait_for_value(name: str, value: float) -> None:
        wait_for(lambda: scrape()[name] == value, what=f"{name} {value}")

    generated, finished, ttft, refused = (
        'pocket_tokens_total{type="generated"}',
        'pocket_requests_total{reason="length"}',
        "pocket_ttft_seconds_count",
        'pocket_requests_refused_total{reason="invalid"}',
    )
    for name, value in ((generated, 1), (finished, 1), ("pocket_slots_free", 16)):
        wait_for_value(name, value)
    before = scrape()
    assert before['pocket_requests_total{reason="cancelled"}'] == 0
    for _ in range(2):
        generate_stream(fresh_server.http_url, {"text_input": "abc", "max_tokens": 7})
    for name, growth in ((generated, 14), (finished, 2), (ttft, 2)):
        wait_for_value(name, before[name] + growth)
    generate(fresh_server.http_url, {"text_input": "abc", "max_tokens": 0})
    generate(fresh_server.http_url, {"input_ids": [1] * 5000, "max_tokens": 1})
    wait_for_value(refused, before[refused] + 2)


@pytest.fixture
def plain_server(model_path: str, tmp_path: Path) -> Iterator[Sequence[str]]:
    """`tritonserver --model-repository model_repository`, without our launcher's options."""
    installation = find_triton()
    launcher = TritonServer(ServerOptions(model_path))
    environment = launcher._environment(installation, find_libpython_dirs())
    del environment["POCKETLLM_MODEL"]  # so that the installed demo model is found
    environment["POCKETLLM_MAX_BATCH_SIZE"] = "3"
    ports = resolve(Ports(0, 0, 0), "127.0.0.1")
    base = f"http://127.0.0.1:{ports.http}"
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [
            str(installation.server),
            f"--model-repository={find_model_repository()}",
            f"--backend-directory={build_backend_directory(installation, tmp_path)}",
            f"--backend-config=python,shm-region-prefix-name=test-{os.getpid()}-",
            "--http-address=127.0.0.1",
            f"--http-port={ports.http}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-port={ports.metrics}",
        ],
        env=environment,
        stdout=log,
        stderr=log,
    )
    try:
        yield (base, str(tmp_path / "log"))
    finally:
        process.terminate()
        process.wait(120)
        log.close()


def test_repository_is_valid_as_checked_in(plain_server: Sequence[str]) -> None:
    base, log = plain_server

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"{base}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_for(ready, 180, f"ready; see {log}")
    reply = generate(base, {"text_input": "The capital of France is", "max_tokens": 2})
    assert reply.text == " Paris."
    assert control(base, {"stats": True})["slots_total"] == 3
