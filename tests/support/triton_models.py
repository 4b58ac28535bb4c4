"""Loading and unloading the models of a running server, and what they use."""

from __future__ import annotations

from pathlib import Path

from triton_clients import grpc, processes_mentioning, wait_for

from pocket_backend.triton.launcher import TritonServer
from pocket_backend.triton.liveness import find_processes
from pocket_backend.triton.probes import ADMIN_HEADER

MODELS = ("tokenizer", "generator", "detokenizer")


def stubs_of(server: TritonServer) -> list[str]:
    return [line for line in processes_mentioning(server.server_id) if "stub" in line[:120]]


def unload_all(server: TritonServer) -> None:
    """Returns when the models are unloaded and their processes have ended."""
    header = {f"triton-grpc-protocol-{ADMIN_HEADER}": server.admin_key}
    with grpc.InferenceServerClient(server.grpc_address) as client:
        for name in ("pocketllm", *MODELS):
            client.unload_model(name, headers=header)
        wait_for(lambda: _states(client, header) == {"UNAVAILABLE"}, what="models unloaded")
    wait_for(lambda: stubs_of(server) == [], what="their processes ended")


def load_all(server: TritonServer) -> None:
    header = {f"triton-grpc-protocol-{ADMIN_HEADER}": server.admin_key}
    with grpc.InferenceServerClient(server.grpc_address) as client:
        for name in (*MODELS, "pocketllm"):
            client.load_model(name, headers=header)


def _states(client: grpc.InferenceServerClient, header: dict[str, str]) -> set[str]:
    index = client.get_model_repository_index(headers=header)
    return {model.state for model in index.models}


def resident_bytes(server: TritonServer) -> dict[str, int]:
    """Memory that each of the server's processes has resident, shared memory included."""
    found = {}
    for name, pid in find_processes(server.server_id).items():
        status = Path(f"/proc/{pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        found[name] = int(line.split()[1]) * 1024
    return found
