"""The parts of the launcher that need no server: ports, shared memory, installation, log lines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pocket_backend.api import ConfigurationError, ModelLoadError
from pocket_backend.triton import installation, shm
from pocket_backend.triton.guardian import GuardianSpec
from pocket_backend.triton.launcher import (
    ServerOptions,
    TritonServer,
    build_backend_directory,
    check_model_file,
    find_model_repository,
)
from pocket_backend.triton.ports import Ports, resolve, resolve_one
from pocket_backend.triton.server_log import clean_message, failure_lines, load_failure, starved
from pocket_backend.triton.settings import resolve_model

# --- ports ----------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


def test_zero_picks_three_different_free_ports() -> None:
    ports = resolve(Ports(0, 0, 0), "127.0.0.1")
    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    assert 0 not in (ports.http, ports.grpc, ports.metrics)


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_port_in_use_names_port_and_remedy(taken: int, name: str) -> None:
    ports = Ports(**{"http": 0, "grpc": 0, "metrics": 0, name: taken})
    with pytest.raises(ConfigurationError, match=rf"port {taken} .*in use.*--{name}-port"):
        resolve(ports, "127.0.0.1")


@pytest.mark.parametrize(
    ("ports", "message"), [((70_000, 0, 0), "--http-port: got 70000"), ((5, 5, 0), "different")]
)
def test_bad_ports(ports: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Ports(*ports)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path)) == str(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ConfigurationError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\); name"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("fake") == "fake"


def test_foreign_address_is_explained() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1"):
        resolve(Ports(0, 0, 0), "192.0.2.1")


def test_one_more_port_is_chosen_or_refused_alike(taken: int) -> None:
    assert 0 < resolve_one("gateway", 0, "127.0.0.1") != taken
    with pytest.raises(ConfigurationError, match=rf"port {taken} .*in use.*--gateway-port"):
        resolve_one("gateway", taken, "127.0.0.1")
    with pytest.raises(ConfigurationError, match="--gateway-port: got -1; must be from 0 to"):
        resolve_one("gateway", -1, "127.0.0.1")


# --- shared memory --------------------------------------------------------------------------------


def test_only_what_belongs_to_the_dead_is_removed(tmp_path: Path) -> None:
    living, dead = shm.new_server_id(), shm.new_server_id()
    foreign = tmp_path / "triton_python_backend_shm_region_1"
    odd = tmp_path / "pocketllm-notours.lock"
    for path in (foreign, odd):
        path.touch()
    lock = shm.ServerLock(living, tmp_path)
    (tmp_path / f"pocketllm-{dead}.lock").touch()
    for server in (living, dead):
        (tmp_path / f"{shm.region_prefix(server)}region").touch()
    assert shm.clean_stale_servers(tmp_path) == [dead]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {foreign.name, odd.name, lock.path.name, f"{shm.region_prefix(living)}region"}
    lock.release()
    lock.release()
    assert shm.remove_regions(living, tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {foreign.name, odd.name}


def test_a_lock_is_exclusive_and_dies_with_its_process(tmp_path: Path) -> None:
    server = shm.new_server_id()
    code = (
        "import sys, time; from pathlib import Path; from pocket_backend.triton.shm import *\n"
        f"lock = ServerLock({server!r}, Path({str(tmp_path)!r})); print('held', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(BlockingIOError):
            shm.ServerLock(server, tmp_path)
        assert shm.clean_stale_servers(tmp_path) == []
        holder.kill()
    assert shm.clean_stale_servers(tmp_path) == [server]


def test_too_little_space_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"MiB free but Triton needs .* --shm-size"):
        shm.check_free_space(tmp_path, needed=1 << 60)
    with pytest.raises(ConfigurationError, match="not usable"):
        shm.check_free_space(tmp_path / "absent")


# --- installation ---------------------------------------------------------------------------------


def test_unsupported_python_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"Python 3\.13 is not supported.*3\.11 or 3\.12"):
        installation.check_python((3, 13))
    installation.check_python((3, 12))


def test_static_interpreter_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_libpython_name", lambda: "libpython9.9.so.1.0")
    with pytest.raises(ConfigurationError, match=r"apt-get install libpython3\.\d+"):
        installation.find_libpython_dirs()


def test_missing_server_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "_site_directories", lambda: [tmp_path])
    monkeypatch.setattr(installation, "_SYSTEM_ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="install the nvidia-pytriton package"):
        installation.find_triton()
    monkeypatch.setenv("POCKETLLM_TRITONSERVER", "/nowhere/tritonserver")
    with pytest.raises(ConfigurationError, match="POCKETLLM_TRITONSERVER: /nowhere"):
        installation.find_triton()


def test_system_server_brings_its_own_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in the public images: /opt/tritonserver with the stub beside the backend library."""
    monkeypatch.setattr(installation, "_site_directories", list)
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("POCKETLLM_TRITONSERVER", str(tmp_path / "bin" / "tritonserver"))
    found = installation.find_triton()
    assert found.stub is None
    assert build_backend_directory(found, tmp_path) == tmp_path / "backends"


def test_wheel_stub_becomes_executable(tmp_path: Path) -> None:
    backend, stub = tmp_path / "python", tmp_path / "stub"
    backend.mkdir()
    (backend / "libtriton_python.so").touch()
    stub.write_bytes(b"elf")
    stub.chmod(0o600)
    found = installation.TritonInstallation(tmp_path / "server", backend, stub, ())
    made = build_backend_directory(found, tmp_path / "run") / "python"
    assert os.access(made / "triton_python_backend_stub", os.X_OK)
    assert (made / "libtriton_python.so").exists()
    assert not os.access(stub, os.X_OK)


# --- model, options -------------------------------------------------------------------------------


def test_model_file_is_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        check_model_file(str(tmp_path / "absent.gguf"))
    with pytest.raises(ModelLoadError, match="holds neither config"):
        check_model_file(str(tmp_path))
    (tmp_path / "m-00002-of-00002.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"is part 2 of 2 .* m-00001-of-00002"):
        check_model_file(str(tmp_path / "m-00002-of-00002.gguf"))
    check_model_file("fake")
    server = TritonServer(ServerOptions(str(tmp_path / "absent.gguf")))
    with pytest.raises(ModelLoadError, match="does not exist"):
        server.start()
    assert not server.running
    server.stop()


@pytest.mark.parametrize(
    ("reason", "starts"), [("boost::interprocess::lock_exception", 3), ("something else", 1)]
)
def test_a_server_that_was_starved_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str, starts: int
) -> None:
    """Real guardians, and in place of Triton a program that aborts as it does."""
    binary, backends = tmp_path / "tritonserver", tmp_path / "backends" / "python"
    backends.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho >> {tmp_path}/starts\necho '{reason}' >&2\nkill -ABRT $$\n")
    binary.chmod(0o700)
    found = installation.TritonInstallation(binary, backends, None, ())
    monkeypatch.setattr("pocket_backend.triton.launcher.find_triton", lambda: found)
    server = TritonServer(ServerOptions("fake", ports=Ports(0, 0, 0)))
    message = "too busy" if starts > 1 else reason
    with pytest.raises(ConfigurationError, match=message):
        server.start()
    assert (tmp_path / "starts").read_text().count("\n") == starts
    assert not list(shm.SHM_DIR.glob(f"*{server.server_id}*"))


def test_repository_is_found() -> None:
    assert (find_model_repository() / "generator" / "1" / "model.py").is_file()


def test_urls_reach_wildcard_and_ipv6_hosts() -> None:
    wildcard = TritonServer(ServerOptions("fake", host="0.0.0.0", ports=Ports(1, 2, 3)))
    assert (wildcard.http_url, wildcard.grpc_address) == ("http://127.0.0.1:1", "127.0.0.1:2")
    assert TritonServer(ServerOptions("fake", host="::1")).http_url == "http://[::1]:8000"


# --- guardian -------------------------------------------------------------------------------------


def guardian(tmp_path: Path, argv: list[str]) -> tuple[subprocess.Popen[bytes], GuardianSpec]:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    spec = GuardianSpec(
        server_id=shm.new_server_id(),
        argv=argv,
        environment=dict(os.environ),
        log_file=str(tmp_path / "log"),
        runtime_dir=str(runtime),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "pocket_backend.triton.guardian"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(spec.to_line())
    process.stdin.flush()
    return process, spec


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_guardian_ends_a_stubborn_server_and_its_orphans(tmp_path: Path) -> None:
    """The server ignores SIGTERM and has a child that lost its parent, as a stub may."""
    pids = tmp_path / "pids"
    server = (
        f"trap '' TERM; (sleep 60 & echo $! > {pids}); echo $$ >> {pids}; while :; do sleep 1; done"
    )
    process, spec = guardian(tmp_path, ["/bin/sh", "-c", server])
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        time.sleep(0.02)
    region = shm.SHM_DIR / f"{shm.region_prefix(spec.server_id)}test"
    region.touch()
    assert process.stdin is not None
    process.stdin.close()  # what the kernel does when the launcher is killed
    assert process.wait(60) == 128 + 9
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    assert not region.exists()
    assert not Path(spec.runtime_dir).exists()
    assert not list(shm.SHM_DIR.glob(f"*{spec.server_id}*"))


def test_guardian_keeps_the_log_of_a_server_that_ended_by_itself(tmp_path: Path) -> None:
    process, spec = guardian(tmp_path, ["/bin/sh", "-c", "echo reason; exit 7"])
    assert process.wait(60) == 7
    assert process.stdin is not None
    process.stdin.close()
    assert Path(spec.runtime_dir).exists()
    assert Path(spec.log_file).read_text() == "reason\n"


def test_guardian_without_a_word_from_its_launcher_ends() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pocket_backend.triton.guardian"],
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0


# --- log ------------------------------------------------------------------------------------------

LOG = (
    "I1129 18:48:50.1 1 server.cc:1] fine\n"
    'E1129 18:48:50.9 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
    "E1129 18:48:52.4 1 model_lifecycle.cc:642] \"failed to load 'generator' version 1: Internal: "
    "TritonModelException: model: 'x' is not a GGUF file\\n\\nAt:\\n  /a/b.py(17): <module>\\n\"\n"
)


def test_log_gives_the_reason_without_decoration() -> None:
    assert load_failure(LOG) == "model: 'x' is not a GGUF file"
    assert load_failure("I1129 nothing\n") is None
    assert not starved(LOG)
    assert failure_lines(LOG) == LOG.splitlines()[2]
    assert failure_lines("one\n\ntwo\n") == "one\ntwo"
    assert clean_message("Unavailable: ImportError: no module") == "no module"
