"""What nvidia-smi said: its GPUs, or what is wrong with the driver and how that is mended.

Broken machines answer on either stream, with any exit status, and mix errors with data: every line is judged alone.
"""

from __future__ import annotations

import re

from psctl.topology.facts import Finding, Gpu

NVIDIA = "0x10de"
"""PCI vendor."""

_TROUBLES: tuple[tuple[str, str], ...] = (
    (r"Driver/library version mismatch",
     "the driver was updated under a running kernel module: reboot the host, or unload and load the nvidia module"),
    (r"GPU access blocked by the operating system",
     "WSL or a container hides the GPU: update the Windows driver, or start the container with its GPUs"),
    (r"Insufficient Permissions", "this user may not open /dev/nvidia*: add it to the group that owns these files"),
    (r"couldn't communicate with the NVIDIA driver|Driver Not Loaded|NVIDIA driver is not loaded",
     "load the kernel module (modprobe nvidia), or install the driver for the running kernel"),
    (r"Unable to determine the device handle",
     "the GPU fell off the bus: look for Xid in dmesg, then reset it or power the host down and up"),
    (r"GPU is lost|Unknown Error|GPU requires reset",
     "the GPU does not answer: look for Xid in dmesg, then reset it or reboot the host"),
    (r"No devices were found",
     "the driver runs and finds no GPU: look for Xid in dmesg and that the card is seated and powered, then reboot"),
    (r"Failed to initialize NVML",
     "the driver's library and its kernel module do not meet: restart the container, or reboot the host"),
)  # fmt: skip
"""What a line says -> what to do; the first that fits counts."""

_LATER_LINE = re.compile(r"NVML library version", re.IGNORECASE)
"""Lines that only add to the one before."""


def read_gpus(
    lines: list[str], status: int, pci: list[str], nodes: list[str]
) -> tuple[tuple[Gpu, ...], tuple[Finding, ...]]:
    """Return the GPUs that answer, and what is broken.

    Args:
        lines: nvidia-smi's output and errors.
        status: its exit status; 127: there is no nvidia-smi, 124: it did not answer.
        pci: "address<tab>vendor<tab>numa node" of every display device.
        nodes: the GPU files under /dev.
    """
    cards = [card for card in (line.split("\t") for line in pci) if len(card) == 3]
    numa = {_bus(card[0]): int(card[2]) for card in cards if re.fullmatch(r"[0-9]+", card[2].strip())}
    gpus = tuple(gpu for line in lines if (gpu := _gpu(line, numa)) is not None)
    present = sum(card[1].strip() == NVIDIA for card in cards) or len(nodes)
    return gpus, tuple(_findings(lines, status, len(gpus), present))


def _gpu(line: str, numa: dict[str, int]) -> Gpu | None:
    """One line of the query: "0, NVIDIA H200, 143771 MiB, 570.86.15, 00000000:0F:00.0"."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 5 or not cells[0].isdecimal():
        return None
    memory = re.fullmatch(r"([0-9]+) MiB", cells[2])
    bus = _bus(cells[4])
    return Gpu(int(cells[0]), cells[1], int(memory[1]) << 20 if memory else 0, cells[3], bus, numa.get(bus))


def _bus(text: str) -> str:
    """nvidia-smi writes a domain of eight digits in capitals, /sys four small ones."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _findings(lines: list[str], status: int, answering: int, present: int) -> list[Finding]:
    found: list[Finding] = []
    for line in (line.strip() for line in lines):
        cure = next((cure for pattern, cure in _TROUBLES if re.search(pattern, line, re.IGNORECASE)), None)
        if cure is not None and not _LATER_LINE.search(line) and all(line != one.what for one in found):
            found.append(Finding(line[:200], cure))
    if found:
        return found
    if status == 127:
        if present:
            what = f"{present} NVIDIA GPU{'s' if present > 1 else ''} in this host, and no nvidia-smi"
            found.append(Finding(what, "install NVIDIA's driver (nvidia-smi comes with it), or put it on PATH"))
    elif status == 124:
        found.append(Finding("nvidia-smi did not answer within 20 s", "look for Xid in dmesg, then reboot the host"))
    elif status != 0 or not answering:
        said = lines[-1].strip()[:120] if lines and not answering else "nothing"
        if status != 0 or present:
            found.append(Finding(f"nvidia-smi ended with {status} and said: {said}", "run nvidia-smi on the host"))
    return found
