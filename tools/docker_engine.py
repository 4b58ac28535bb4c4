"""A private Docker engine for the tests: started from nothing, ended by pid, nothing left behind.

    python tools/docker_engine.py install     # Debian's engine, Compose, buildx, haproxy (root)
    python tools/docker_engine.py start       # prints the address for DOCKER_HOST
    python tools/docker_engine.py stop        # its containers, bridges and firewall rules, too

Images stay in the state folder (.cache/docker), so the next start has them. It uses neither the
machine's own engine nor its socket: a network pool, a data root and a runtime folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_STATE = ROOT / ".cache" / "docker"
PLUGINS = ("docker-compose", "docker-buildx")
_PLUGIN_SUITE = "trixie"
"""The first Debian release that has Compose 2 and buildx; both run with bookworm's engine."""
_PLUGIN_FOLDER = Path("/usr/libexec/docker/cli-plugins")
_POOL = "base=10.213.0.0/16,size=24"
_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_CHAINS = (
    ("filter", "DOCKER-USER"), ("filter", "DOCKER-ISOLATION-STAGE-1"),
    ("filter", "DOCKER-ISOLATION-STAGE-2"), ("filter", "DOCKER"), ("nat", "DOCKER"),
)  # fmt: skip
_started: dict[int, subprocess.Popen[bytes]] = {}
"""Engines that this process started: it is their parent, and must wait for them."""
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


class EngineError(Exception):
    """Why there can be no engine, in one sentence."""


def missing() -> str | None:
    """What keeps an engine from being started here; None if nothing does."""
    if os.geteuid() != 0:
        return "starting a Docker engine needs root"
    absent = [name for name in ("docker", "dockerd", "containerd", "runc", "iptables", "ip")
              if shutil.which(name) is None]  # fmt: skip
    if absent:
        return f"{', '.join(absent)} missing: python tools/docker_engine.py install"
    for plugin in ("compose", "buildx"):
        if subprocess.run(["docker", plugin, "version"], capture_output=True).returncode != 0:
            return f"docker {plugin} missing: python tools/docker_engine.py install"
    return None


def install() -> None:
    """Debian's engine and haproxy, Compose and buildx from a newer suite. Needs root and a mirror.

    Raises:
        EngineError: not root, or not a Debian with apt.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineError("installing an engine needs root on a Debian system")
    haproxy = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if missing() is None and haproxy is not None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run("apt-get", "-qq", "update", env=environment)
    _run(
        "apt-get", "install", "-y", "-qq", "--no-install-recommends",
        "docker.io", "iptables", "iproute2", "debootstrap", "haproxy", env=environment,
    )  # fmt: skip
    if missing() is not None:
        with tempfile.TemporaryDirectory() as folder:
            _install_plugins(Path(folder))


def _install_plugins(folder: Path) -> None:
    """Download two packages of another suite, without touching apt's own lists, and unpack them."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    line = f"deb [signed-by={keyring}] {debian_mirror()} {_PLUGIN_SUITE} main\n"
    (folder / "source.list").write_text(line)
    options = {
        "Dir::Etc::sourcelist": folder / "source.list", "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null", "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status", "Dir::Cache::archives": folder / "archives",
        "APT::Sandbox::User": "root",
    }  # fmt: skip
    flags = [f"-o{key}={value}" for key, value in options.items()]
    _run("apt-get", *flags, "-qq", "update")
    _run("apt-get", *flags, "-qq", "download", *PLUGINS, cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg", "-x", str(package), str(folder / "unpacked"))
    _PLUGIN_FOLDER.mkdir(parents=True, exist_ok=True)
    for plugin in (folder / "unpacked" / _PLUGIN_FOLDER.relative_to("/")).iterdir():
        shutil.copy2(plugin, _PLUGIN_FOLDER / plugin.name)


def debian_mirror() -> str:
    """The mirror that this machine's apt uses."""
    for path in sorted(Path("/etc/apt").rglob("*.sources")) + sorted(
        Path("/etc/apt").rglob("*.list")
    ):
        for line in path.read_text(errors="replace").splitlines():
            words = line.split()
            if line.startswith("URIs:") and len(words) > 1:
                return words[1]
            if line.startswith("deb "):
                return next(word for word in words[1:] if "://" in word)
    raise EngineError("apt has no source: /etc/apt/sources.list is empty")


def start(state: Path) -> str:
    """Start an engine, or find the running one. Returns its address for ``DOCKER_HOST``.

    Raises:
        EngineError: it cannot run here; says why.
    """
    found = _running(state)
    if found is not None:
        return str(found["address"])
    problem = missing()
    if problem is not None:
        raise EngineError(problem)
    state.mkdir(parents=True, exist_ok=True)
    # Short: the path of a Unix socket may have 107 characters.
    runtime = Path(tempfile.mkdtemp(prefix="pocketllm-docker-"))
    address = f"unix://{runtime}/docker.sock"
    record = {
        "address": address, "runtime": str(runtime), "forwarding": _FORWARDING.read_text().strip(),
        "forward_policy": _forward_policy(),
        "chains": [list(chain) for chain in _CHAINS if _has_chain(*chain)],
    }  # fmt: skip
    with (state / "dockerd.log").open("ab") as log:
        process = subprocess.Popen(
            [
                "dockerd", "--data-root", str(state / "data"), "--exec-root", str(runtime / "exec"),
                "-H", address, "-p", str(runtime / "docker.pid"),
                # No bridge of its own: each project has one, builds use the host's network.
                "--bridge", "none", "--default-address-pool", _POOL,
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    record["pid"] = process.pid
    _started[process.pid] = process
    _record_file(state).write_text(json.dumps(record))
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if _docker(address, "version").returncode == 0:
            return address
        time.sleep(0.1)
    stop(state)
    tail = (state / "dockerd.log").read_text(errors="replace").splitlines()[-5:]
    raise EngineError("dockerd does not answer; its log ends: " + " | ".join(tail))


def stop(state: Path) -> None:
    """Remove containers and networks, end the engine, and undo what it changed on this machine."""
    record = _running(state)
    if record is None:
        return
    address = str(record["address"])
    bridges = _clear(address)
    _end(int(record["pid"]))
    for bridge in bridges:
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)
    _remove_rules(bridges)
    if not _other_engines():
        _remove_chains({tuple(chain) for chain in record["chains"]})
        _run("iptables", "-P", "FORWARD", str(record["forward_policy"]))
        _FORWARDING.write_text(str(record["forwarding"]))
    for mount in reversed(_mounts_below(Path(record["runtime"]))):
        subprocess.run(["umount", "-l", mount], capture_output=True, check=False)
    shutil.rmtree(record["runtime"], ignore_errors=True)
    _record_file(state).unlink(missing_ok=True)


@contextlib.contextmanager
def engine(state: Path = DEFAULT_STATE) -> Iterator[str]:
    """The address of an engine that lasts as long as the context, unless it ran before."""
    ran_before = _running(state) is not None
    address = start(state)
    try:
        yield address
    finally:
        if not ran_before:
            stop(state)


def _clear(address: str) -> list[str]:
    """Remove all containers and networks; returns the bridges that the networks had."""
    containers = _docker(address, "ps", "--all", "--quiet").stdout.split()
    if containers:
        _docker(address, "rm", "--force", "--volumes", *containers)
    networks = _docker(
        address, "network", "ls", "--quiet", "--no-trunc", "--filter", "driver=bridge"
    ).stdout.split()
    if networks:
        _docker(address, "network", "rm", *networks)
    return [f"br-{network[:12]}" for network in networks]


def _end(pid: int) -> None:
    """SIGTERM and then SIGKILL; returns when the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while _alive(pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if process := _started.pop(pid, None):
        process.wait()


def _alive(pid: int) -> bool:
    """Whether it runs; a zombie has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"dockerd")
    except OSError:
        return False


def _running(state: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(_record_file(state).read_text())
    except (OSError, ValueError):
        return None
    return record if _alive(int(record["pid"])) else None


def _record_file(state: Path) -> Path:
    return state / "engine.json"


# --- what an engine changes on its host -----------------------------------------------------------


def _other_engines() -> bool:
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            # A zombie, which its parent has not waited for, has no command line.
            if path.read_text().strip() == "dockerd" and path.with_name("cmdline").read_bytes():
                return True
    return False


def _iptables(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["iptables", "-w", *arguments], capture_output=True, text=True)


def _has_chain(table: str, chain: str) -> bool:
    return _iptables("-t", table, "-n", "-L", chain).returncode == 0


def _forward_policy() -> str:
    first = _iptables("-S", "FORWARD").stdout.split()
    return first[2] if len(first) > 2 else "ACCEPT"


def _remove_rules(bridges: Sequence[str]) -> None:
    """Rules that name one of ``bridges``, in any chain."""
    for table in ("filter", "nat"):
        for line in _iptables("-t", table, "-S").stdout.splitlines():
            words = line.split()
            if words[0] == "-A" and any(bridge in words for bridge in bridges):
                _iptables("-t", table, "-D", *words[1:])


def _remove_chains(kept: set[tuple[str, ...]]) -> None:
    """The engine's own chains, and the jumps to them; not those of ``kept``."""
    ours = [chain for chain in _CHAINS if chain not in kept and _has_chain(*chain)]
    for table, chain in ours:
        for line in _iptables("-t", table, "-S").stdout.splitlines():
            words = line.split()
            if words[0] == "-A" and words[-2:] == ["-j", chain]:
                _iptables("-t", table, "-D", *words[1:])
        _iptables("-t", table, "-F", chain)
    for table, chain in ours:
        _iptables("-t", table, "-X", chain)


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]


def _docker(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_HOST": address}
    return subprocess.run(
        ["docker", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def _run(*command: str, **options: Any) -> None:
    """Raises EngineError with the command's own words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise EngineError(f"{' '.join(command[:4])} ... failed: {done.stderr.strip()[-500:]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("action", choices=("install", "start", "stop", "check"))
    parser.add_argument(
        "--state", type=Path, default=DEFAULT_STATE, help="images and logs (%(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        if options.action == "install":
            install()
        elif options.action == "start":
            print(start(options.state))
        elif options.action == "stop":
            stop(options.state)
        else:
            problem = missing()
            if problem is not None:
                raise EngineError(problem)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
