"""The collectives of the script on test hosts with shaped links: psctl's, Gloo's and Open MPI's.

    python bench/collectives.py [--hosts 4] [--rate 500] [--sizes 4KB,1MB,16MB] [--operations all-gather,broadcast ...]

Test hosts of this machine (root, sshd, iproute2), one rank a host. psctl's times and Gloo's (`native`) are those of
`psctl bench OPERATION`, where they take turns; psctl's is that of the algorithm that the plan predicts to be the
fastest, as `run.all_gather` and the others use it. Open MPI runs over the same links directly after it, over TCP, with
its own choice of algorithm. It prints Markdown for docs/internals/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from open_mpi import compile_bench, measure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from psctl.units import parse_size  # noqa: E402
from tests.helpers.hosts import Hosts  # noqa: E402

OPERATIONS = "allreduce,broadcast,reduce,gather,scatter,all-gather,reduce-scatter,all-to-all"
FIRST = "h1"


def psctl(home: dict[str, str], operation: str, sizes: str) -> list[dict[str, Any]]:
    """Return the rows of `psctl bench`."""
    done = subprocess.run(
        [sys.executable, "-m", "psctl", "bench", operation, "--cluster", "lab", "--sizes", sizes, "-o", "json"],
        env={**home, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1800, check=False,
        cwd=home["HOME"],
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found


class OverHosts:
    """Open MPI between test hosts; started on the first, which reaches the others by SSH."""

    def __init__(self, hosts: Hosts, program: Path) -> None:
        self.hosts = hosts
        for name in hosts:
            copy = hosts.path(name, "/root/bench")
            copy.write_bytes(program.read_bytes())
            copy.chmod(0o755)
        key = hosts.path(FIRST, "/root/id_login")
        key.write_bytes(hosts.key.read_bytes())
        key.chmod(0o600)
        agent = "ssh -i /root/id_login -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        network = hosts[FIRST].address.rsplit(".", 1)[0] + ".0/24"
        self.words = [
            "mpirun", "--allow-run-as-root", "--host", ",".join(f"{hosts[name].address}:1" for name in hosts),
            "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self", "--mca", "pml", "ob1",
            "--mca", "mpi_yield_when_idle", "1",  # all hosts share this machine's processors
            "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network, "/root/bench",
        ]  # fmt: skip

    def run(self, command: list[str]) -> str:
        """Return the output of a command on the first host."""
        return self.hosts.exec(FIRST, command, timeout=1800).stdout


def row(operation: str, size: int, found: list[dict[str, Any]], mpi: dict[int, float]) -> str:
    """Return a line of the table."""
    mine = [one for one in found if one["bytes"] == size]
    assert all(one["correct"] for one in mine), "every result is right"
    native = next((one["seconds"]["median"] for one in mine if one["strategy"] == "native"), None)
    ours = min((one for one in mine if one["strategy"] != "native"), key=lambda one: one["predicted_seconds"])
    seconds = ours["seconds"]["median"]
    cells = [f"{one * 1e3:.2f} | {one / seconds:.2f}" if one else "- | -" for one in (native, mpi.get(size))]
    return f"| {operation} | {size:,} | {ours['strategy']} | {seconds * 1e3:.2f} | {cells[0]} | {cells[1]} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=500, help="Mbit/s")
    parser.add_argument("--sizes", default="4KB,1MB,16MB")
    parser.add_argument("--operations", default=OPERATIONS)
    given = parser.parse_args()
    if os.getuid() != 0:
        print("needs root")
        return 1
    sizes = [parse_size(size) for size in given.sizes.split(",")]
    with Hosts(given.hosts, rate=f"{given.rate}mbit") as hosts, tempfile.TemporaryDirectory() as folder:
        home = hosts.make_home(Path(folder) / "home")
        file = Path(folder) / "lab.yaml"
        file.write_text(hosts.cluster_text())
        subprocess.run(
            [sys.executable, "-m", "psctl", "up", str(file), "--yes"], env={**home.env, "PYTHONPATH": str(ROOT)},
            check=True, capture_output=True,
        )  # fmt: skip
        program = compile_bench(Path(folder))
        mpi = OverHosts(hosts, program) if program else None
        print(f"{given.hosts} hosts of {given.rate} Mbit/s, load {os.getloadavg()[0]:.1f}; medians\n")
        print("| collective | bytes | psctl plays | ms | Gloo: ms | /psctl | Open MPI: ms | /psctl |")
        print("|---|---|---|---|---|---|---|---|")
        for operation in given.operations.split(","):
            found = psctl(home.env, operation, given.sizes)
            measured = measure(mpi.run, mpi.words, operation, sizes) if mpi else {}
            for size in sizes:
                print(row(operation, size, found, measured), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
