"""Kernels beside the machine's peaks: ``python -m perf.bench_kernels [--json FILE] [options]``.

A thin wrapper: it builds the C++ tool ``bench_kernels`` (release, ``build/cpp-release``), runs it
and checks the records that it wrote. Further options (``--threads``, ``--rounds``, ``--isa``,
``--formats``, ``--rows``, ``--statistic``) are passed on; ``docs/kernels.md`` has what is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from perf.machine import describe_machine
from perf.records import read_records

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cpp-release"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        epilog="Further options go to the C++ tool: --threads --rounds --isa --formats --rows "
        "--statistic",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    parser.add_argument("--binary", type=Path, help="a bench_kernels built elsewhere")
    options, passed_on = parser.parse_known_args(arguments)
    try:
        binary = options.binary or build()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"bench_kernels: cannot build the C++ tool: {error}", file=sys.stderr)
        return 2
    command = [str(binary), *passed_on]
    if options.json is not None:
        command += ["--json", str(options.json)]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        return status
    print(f"\n{describe_machine().summary()}. Command: {' '.join(command[1:]) or 'no options'}")
    if options.json is not None:
        print(f"{len(read_records(options.json))} records in {options.json}")
    return 0


def build() -> Path:
    """Build the tool and return its path.

    Raises:
        OSError: no CMake.
        subprocess.CalledProcessError: CMake or the compiler failed; see the terminal.
    """
    beside = Path(sys.executable).parent
    # CMake and Ninja of the running environment first, activated or not.
    environment = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"}
    cmake = shutil.which("cmake", path=environment["PATH"])
    if cmake is None:
        raise FileNotFoundError("no cmake; install the 'test' extra")
    for step in (
        [cmake, "--preset", "release", "-DPOCKET_BUILD_TOOLS=ON"],
        [cmake, "--build", str(BUILD), "--target", "bench_kernels"],
    ):
        subprocess.run(
            step, cwd=ROOT / "cpp_engine", env=environment, check=True, stdout=subprocess.DEVNULL
        )
    return BUILD / "tools" / "bench_kernels"


if __name__ == "__main__":
    raise SystemExit(main())
