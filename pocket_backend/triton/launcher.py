"""Starts, watches and stops one Triton server that serves our model repository.

    with TritonServer(ServerOptions(model="model.gguf", ports=Ports(0, 0, 0))) as server:
        server.http_url  # answers a real inference by now

``start`` returns only after a real inference succeeded: readiness endpoints answer 200 for a server
whose stub is dead.  All clean-up goes through the guardian process (``guardian.py``), so it happens
after Ctrl-C at any moment, after an exception, and after ``kill -9`` of this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import pocket_backend
from pocket_backend.api.errors import ConfigurationError, ModelLoadError
from pocket_backend.text.gguf_files import gguf_model_file, gguf_parts
from pocket_backend.triton import probes
from pocket_backend.triton.guardian import GuardianSpec, stop_command
from pocket_backend.triton.installation import (
    TritonInstallation,
    check_python,
    find_libpython_dirs,
    find_triton,
)
from pocket_backend.triton.lifeline import FILE_NAME, VARIABLE, Lifeline
from pocket_backend.triton.ports import Ports, resolve
from pocket_backend.triton.probes import ADMIN_HEADER, ENSEMBLE
from pocket_backend.triton.server_log import failure_lines, load_failure, read_log, starved
from pocket_backend.triton.settings import FAKE_MODEL, resolve_model
from pocket_backend.triton.shm import (
    check_free_space,
    clean_stale_servers,
    new_server_id,
    region_prefix,
)
from pocket_backend.triton.trace_options import trace_options

_ERROR_GRACE = 5.0
"""Seconds that a server which answers with errors gets to recover."""
_CLEAN_UP_TIMEOUT = 30.0
_START_ATTEMPTS = 3
"""In all, for a server that a busy machine starved while it started."""
_ADMIN_APIS = "model-repository,shared-memory,logging,trace"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What to serve and where. Engine tunables travel in ``environment`` as ``POCKETLLM_*``."""

    model: str
    """A GGUF file or a Hugging Face directory."""
    host: str = "127.0.0.1"
    ports: Ports = field(default_factory=Ports)
    model_repository: Path | None = None
    """None: the one that ships with this package."""
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    log_file: Path | None = None
    """None: in the runtime directory, which is removed at stop."""
    log_verbose: int = 0
    start_timeout: float = 180.0
    stop_timeout: float = 15.0
    """Seconds that in-flight requests get after SIGTERM."""
    extra_args: tuple[str, ...] = ()


class TritonServer:
    """One server process. Not thread-safe; ``stop`` may be called twice.

    After ``stop`` it may be started again: same ports, same admin key, a new ``server_id``.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.server_id = ""
        """Of the process that runs now, or ran last; in the names of everything that it owns."""
        self.ports = options.ports
        self.admin_key = secrets.token_urlsafe(24)
        """Value of the ``pocketllm-admin`` header that loading and unloading models needs."""
        self._runtime_dir: Path | None = None
        self._guardian: subprocess.Popen[bytes] | None = None
        self._log_start: int | None = None
        """Where this start's part of the log begins."""

    @property
    def http_url(self) -> str:
        return f"http://{_url_host(self.options.host)}:{self.ports.http}"

    @property
    def grpc_address(self) -> str:
        return f"{_url_host(self.options.host)}:{self.ports.grpc}"

    @property
    def metrics_url(self) -> str:
        return f"http://{_url_host(self.options.host)}:{self.ports.metrics}/metrics"

    @property
    def log_path(self) -> Path | None:
        if self.options.log_file is not None:
            return self.options.log_file
        return self._runtime_dir / "server.log" if self._runtime_dir else None

    @property
    def lifeline(self) -> Lifeline:
        """The line to the generator of a server that was started."""
        assert self._runtime_dir is not None
        return Lifeline(self._runtime_dir / FILE_NAME)

    @property
    def running(self) -> bool:
        return self._guardian is not None and self._guardian.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until a real inference succeeded.

        A server that aborts meanwhile because the machine is too busy for it is started again.

        Raises:
            ConfigurationError: this machine or these options cannot work; one sentence says why.
            ModelLoadError: the server refused the model; the message is the reason it gave.
        """
        check_python()
        check_model_file(self.options.model)
        self._model_path()
        installation = find_triton()
        libpython_dirs = find_libpython_dirs()
        remove_stale_servers()
        check_free_space()
        for attempt in range(1, _START_ATTEMPTS + 1):
            try:
                self._start_once(installation, libpython_dirs)
                return
            except _StarvedError:
                if attempt == _START_ATTEMPTS:
                    raise

    def _start_once(
        self, installation: TritonInstallation, libpython_dirs: tuple[Path, ...]
    ) -> None:
        self.ports = resolve(self.ports, self.options.host)
        self.server_id = new_server_id()
        try:
            self._runtime_dir = Path(tempfile.mkdtemp(prefix=f"pocketllm-{self.server_id}-"))
            backends = build_backend_directory(installation, self._runtime_dir)
            self._spawn(
                GuardianSpec(
                    server_id=self.server_id,
                    argv=self._argv(installation.server, backends),
                    environment=self._environment(installation, libpython_dirs),
                    log_file=str(self.log_path),
                    runtime_dir=str(self._runtime_dir),
                )
            )
            self._wait_until_serving()
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout: float | None = None) -> None:
        """SIGTERM, ``timeout`` seconds (``stop_timeout``; 0: no SIGTERM), then SIGKILL.

        Leaves no process and no shared memory. A KeyboardInterrupt during the wait cuts it short;
        the clean-up is the same.
        """
        seconds = self.options.stop_timeout if timeout is None else timeout
        guardian, self._guardian = self._guardian, None
        if guardian is not None:
            assert guardian.stdin is not None
            with contextlib.suppress(OSError):
                guardian.stdin.write(stop_command(seconds))
                guardian.stdin.flush()
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                guardian.wait(seconds + 5.0)
            with contextlib.suppress(OSError):
                guardian.stdin.close()
            guardian.wait(_CLEAN_UP_TIMEOUT)
        if self._runtime_dir is not None:
            shutil.rmtree(self._runtime_dir, ignore_errors=True)
            self._runtime_dir = None

    def probe(self, timeout: float = 10.0) -> None:
        """One real inference of one token; raises OSError (urllib's) when it fails."""
        probes.infer(self.http_url, timeout)

    def _spawn(self, spec: GuardianSpec) -> None:
        log_path = Path(spec.log_file)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        package_root = str(Path(pocket_backend.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": package_root}
        # What an earlier start wrote stays: it says why there is another one.
        if self._log_start is None:  # everybody appends: LogFollower may cut what is written
            log_path.write_bytes(b"")
        with log_path.open("ab") as log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", "pocket_backend.triton.guardian"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._guardian.stdin is not None
        self._guardian.stdin.write(spec.to_line())
        self._guardian.stdin.flush()

    def _argv(self, server: Path, backends: Path) -> list[str]:
        options = self.options
        repository = options.model_repository or find_model_repository()
        admin = f"{_ADMIN_APIS}:{ADMIN_HEADER}={self.admin_key}"
        return [
            str(server),
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={region_prefix(self.server_id)}",
            f"--http-address={options.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={options.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={options.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--http-restricted-api={admin}",
            f"--grpc-restricted-protocol={admin}",
            "--allow-gpu-metrics=false",
            # Not --disable-auto-complete-config: it halves the start, but on a busy machine Triton
            # then aborts, most of the time, when a lock in shared memory times out.
            f"--exit-timeout-secs={max(1, int(options.stop_timeout) - 2)}",
            f"--log-verbose={options.log_verbose}",
            *trace_options({**os.environ, **options.environment}),
            *options.extra_args,
        ]

    def _environment(
        self, installation: TritonInstallation, libpython_dirs: tuple[Path, ...]
    ) -> dict[str, str]:
        environment = {**os.environ, **self.options.environment}
        environment["POCKETLLM_MODEL"] = self._model_path()
        libraries = [*map(str, installation.library_dirs), *map(str, libpython_dirs)]
        environment["LD_LIBRARY_PATH"] = _join_paths(libraries, environment.get("LD_LIBRARY_PATH"))
        # An embedded interpreter takes its prefix from the `python3` that it finds on PATH.
        environment["PATH"] = _join_paths(
            [str(Path(sys.executable).parent)], environment.get("PATH")
        )
        environment["PYTHONPATH"] = _join_paths(
            [str(Path(pocket_backend.__file__).parent.parent), sysconfig.get_path("purelib")],
            environment.get("PYTHONPATH"),
        )
        environment["PYTHONUNBUFFERED"] = "1"
        if self._runtime_dir is not None:
            environment[VARIABLE] = str(self._runtime_dir / FILE_NAME)
        return environment

    def _model_path(self) -> str:
        return resolve_model(self.options.model)

    def _wait_until_serving(self) -> None:
        """HTTP opens when the models are loaded, so an HTTP error soon after that is not a wait."""
        deadline = time.monotonic() + self.options.start_timeout
        last_error = "no answer yet"
        answered = False
        while time.monotonic() < deadline:
            assert self._guardian is not None
            if self._guardian.poll() is not None:
                raise self._startup_failure()
            try:
                self.probe()
            except urllib.error.HTTPError as error:
                last_error = error.read(2000).decode(errors="replace").strip()
                if not answered:
                    answered = True
                    deadline = min(deadline, time.monotonic() + _ERROR_GRACE)
            except OSError as error:
                last_error = str(error)
            else:
                return
            time.sleep(0.05)
        raise ConfigurationError(
            f"the server started but did not answer an inference; last answer: {last_error}; "
            f"server log:\n{failure_lines(self._read_log())}"
        )

    def _startup_failure(self) -> Exception:
        log = self._read_log()
        reason = load_failure(log)
        if reason is not None:
            return ModelLoadError(reason)
        if starved(log):
            return _StarvedError(
                "the Triton server aborted during start-up because one of its processes got no "
                f"processor time for too long, {_START_ATTEMPTS} times: this machine is too busy; "
                "run less on it, or give the server more processors"
            )
        assert self._guardian is not None
        return ConfigurationError(
            f"the Triton server ended during start-up (status {self._guardian.returncode}); "
            f"its log says:\n{failure_lines(log)}"
        )

    def failure_lines(self) -> str:
        """The lines of the server's log that say what went wrong."""
        return failure_lines(self._read_log())

    def _read_log(self) -> str:
        return read_log(self.log_path, self._log_start or 0)


class _StarvedError(ConfigurationError):
    """The server aborted for want of processor time; the next start may well succeed."""


def remove_stale_servers() -> None:
    """Remove processes, shared memory and runtime directories of servers that were killed together
    with their guardians."""
    for server_id in clean_stale_servers():
        for directory in Path(tempfile.gettempdir()).glob(f"pocketllm-{server_id}-*"):
            shutil.rmtree(directory, ignore_errors=True)


def build_backend_directory(installation: TritonInstallation, runtime_dir: Path) -> Path:
    """The directory for ``--backend-directory``; the wheel's parts are brought together in it."""
    if installation.stub is None:
        return installation.backend_dir.parent
    target = runtime_dir / "backends" / "python"
    target.mkdir(parents=True)
    for source in installation.backend_dir.iterdir():
        if source.is_file():
            (target / source.name).symlink_to(source)
    stub = target / "triton_python_backend_stub"
    # A copy: installers drop the execute bit, and the wheel's files are not ours to change.
    shutil.copyfile(installation.stub, stub)
    stub.chmod(0o755)
    return target.parent


def find_model_repository() -> Path:
    """The repository inside an installed distribution, or that of the checkout."""
    package = Path(pocket_backend.__file__).parent
    for candidate in (package / "model_repository", package.parent / "model_repository"):
        if (candidate / ENSEMBLE / "config.pbtxt").is_file():
            return candidate
    raise ConfigurationError(
        "the model repository is missing from this installation: reinstall pocketllm"
    )


def check_model_file(model: str) -> None:
    """Raises ModelLoadError unless ``model`` names a readable file, whose parts are all there, or a
    model directory."""
    if model == FAKE_MODEL:
        return
    path = gguf_model_file(Path(model).expanduser())
    for file in gguf_parts(path):
        if not file.exists():
            raise ModelLoadError(
                f"model: {file} does not exist; give a GGUF file or a Hugging Face directory"
            )
        if not os.access(file, os.R_OK):
            raise ModelLoadError(f"model: {file} is not readable by this user")


def _join_paths(first: list[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])


def _url_host(host: str) -> str:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{reachable}]" if ":" in reachable else reachable
