"""What NVIDIA's GPUs of a host and the processes on them use, by nvidia-smi, on a thread of its own.

Other makers' GPUs are not read.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

GPUS = ("--query-gpu=uuid,name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
PROCESSES = ("--query-compute-apps=pid,gpu_uuid,used_gpu_memory", "--format=csv,noheader,nounits")
_MIB = 1 << 20
_MOST = 256  # GPUs of a host


class GpuReading(NamedTuple):
    """A GPU: the percent of the time that it is busy (None: not known), and bytes of its memory."""

    uuid: str
    name: str
    busy: int | None
    used: int
    memory: int


class GpuProcess(NamedTuple):
    """A process on a GPU, and the bytes of it that the process holds (0: not known)."""

    pid: int
    uuid: str
    memory: int


class ProcessGpus(NamedTuple):
    """What a process and its children use: percent of the time that their GPUs are busy, and bytes of them."""

    busy: int
    memory: int


NO_GPUS = ProcessGpus(0, 0)
"""What a process uses that is on no GPU."""


def gpus_in(text: str) -> list[GpuReading]:
    """Read the output of nvidia-smi for GPUS; lines that are not of a GPU are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 5 or not cells[0].startswith("GPU-"):
            continue
        *name, busy, used, memory = cells[1:]
        if memory.isdecimal():
            percent = min(100, int(busy)) if busy.isdecimal() else None  # "[N/A]" where MIG is on
            taken = int(used) * _MIB if used.isdecimal() else 0
            found.append(GpuReading(cells[0], ", ".join(name), percent, taken, int(memory) * _MIB))
    return found[:_MOST]


def processes_in(text: str) -> list[GpuProcess]:
    """Read the output of nvidia-smi for PROCESSES; lines that are not of a process are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[0].isdecimal():
            memory = int(cells[2]) * _MIB if cells[2].isdecimal() else 0  # "[N/A]" in some containers
            found.append(GpuProcess(int(cells[0]), cells[1], memory))
    return found


def usage_of(
    gpus: Iterable[GpuReading], processes: Iterable[GpuProcess], session: Callable[[int], int | None]
) -> dict[int, ProcessGpus]:
    """Return what each session uses.

    Args:
        gpus: of the host.
        processes: on them.
        session: returns the session of a process; None: it has ended, or is of another container.
    """
    busy = {gpu.uuid: gpu.busy for gpu in gpus}
    devices: dict[int, set[str]] = {}
    memory: dict[int, int] = {}
    for process in processes:
        found = session(process.pid)
        if found is not None:
            devices.setdefault(found, set()).add(process.uuid)
            memory[found] = memory.get(found, 0) + process.memory
    usage = {}
    for found, uuids in devices.items():
        known = [percent for uuid in uuids if (percent := busy.get(uuid)) is not None]
        usage[found] = ProcessGpus(round(sum(known) / len(known)) if known else 0, memory[found])
    return usage


def run_nvidia_smi(arguments: Iterable[str]) -> str | None:
    """Return the output of nvidia-smi; None where the host has none, or it fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=10.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") or None


class GpuSampler:
    """Reads the GPUs every few seconds; where there are none, once.

    Args:
        every: seconds between two readings.
        run: returns the output of nvidia-smi for these arguments.
    """

    def __init__(self, every: float, run: Callable[[Iterable[str]], str | None] = run_nvidia_smi) -> None:
        self._every, self._run = every, run
        self._lock = threading.Lock()
        self._gpus: list[GpuReading] = []
        self._processes: list[GpuProcess] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, name="psctl gpus", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def end(self) -> None:
        """Read no more."""
        self._over.set()

    def newest(self) -> tuple[list[GpuReading], list[GpuProcess]]:
        """Return the GPUs and the processes on them, at the newest reading; empty without any."""
        with self._lock:
            return list(self._gpus), list(self._processes)

    def _read(self) -> None:
        gpus = gpus_in(self._run(GPUS) or "")
        while gpus and not self._over.is_set():
            processes = processes_in(self._run(PROCESSES) or "")
            with self._lock:
                self._gpus, self._processes = gpus, processes
            self._over.wait(self._every)
            gpus = gpus_in(self._run(GPUS) or "") or gpus  # it hung once: the GPUs are there
