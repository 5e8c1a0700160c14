"""Reads `nvidia-smi nvlink -s`: the NVLinks of each GPU, the rate of each, and the links that are down."""

from __future__ import annotations

import re

from psctl.topology.findings import Finding, listed
from psctl.topology.readers.cells import clean
from psctl.topology.readers.column_alignment import AGAIN
from psctl.topology.readings import NvlinkGpu, NvlinkStatus

_GPU = re.compile(r"\bGPU\s+(\d+)\s*:\s*([^(\n]*?)\s*(?:\(UUID\s*:?\s*([^)\n]*)\)?|$|(?=NVML:))")
_LINK = re.compile(r"\bLink\s+(\d+)\s*:\s*([^\n]*?)\s*(?=\bLink\s+\d+\s*:|$)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])B/s", re.IGNORECASE)
_DOWN = re.compile(r"<?\s*inactive\s*>?", re.IGNORECASE)
_ALL_DOWN = re.compile(r"all links are inactive", re.IGNORECASE)
_NONE = re.compile(r"NVML:|not (?:have|support)", re.IGNORECASE)
_SOLDERED = re.compile(r"SXM|HBM3|\bGB\d{3}|\b[HB]\d{2,3}$")
"""Names of GPUs on boards with NVLinks; other GPUs have no link up without a bridge, which is normal."""

_SCALE = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class _GpuLines:
    """A GPU while its lines are read."""

    def __init__(self, index: int, name: str, uuid: str) -> None:
        self.index, self.name = index, name
        self.uuid = "" if "..." in uuid or "…" in uuid else uuid
        self.links: dict[int, float | None] = {}
        self.unread: list[int] = []
        self.all_down = False
        self.none = False  # the output states that the GPU has no links, or that they cannot be read


def read_nvlink(text: str) -> NvlinkStatus:
    """Return the GPUs in the output of `nvidia-smi nvlink -s`, each with the rates of its links in order.

    An <inactive> link is None. A GPU has no links if it has no NVLink, or if the output only states that all are down,
    which is a finding unless the GPU is a card without a bridge. A host without NVLink prints nothing: no GPUs, no
    findings.
    """
    found: dict[int, _GpuLines] = {}
    here: _GpuLines | None = None
    elided = False
    for line in clean(text).split("\n"):
        stripped = line.strip()
        elided = elided or stripped in ("...", "…", "....")
        if match := _GPU.search(line):
            here = found.setdefault(int(match[1]), _GpuLines(int(match[1]), match[2], match[3] or ""))
        if here:
            _take(here, line)
    gpus = sorted(found.values(), key=lambda gpu: gpu.index)
    read = tuple(
        NvlinkGpu(gpu.index, gpu.name, gpu.uuid, tuple(gpu.links[at] for at in sorted(gpu.links))) for gpu in gpus
    )
    return NvlinkStatus(read, (*_of_links(gpus), *_of_gpus(gpus, elided)))


def _take(gpu: _GpuLines, line: str) -> None:
    """Add the links on one line to this GPU."""
    gpu.all_down = gpu.all_down or bool(_ALL_DOWN.search(line))
    gpu.none = gpu.none or bool(_NONE.search(line))
    for link in _LINK.finditer(line):
        number, state = int(link[1]), link[2]
        if rate := _RATE.match(state):
            gpu.links[number] = float(rate[1]) * _SCALE[rate[2].upper()]
        elif _DOWN.fullmatch(state):
            gpu.links[number] = None
        else:
            gpu.unread.append(number)


def _of_links(gpus: list[_GpuLines]) -> list[Finding]:
    """Return the findings on single GPUs: links without a rate, gaps, fewer links than the other GPUs."""
    findings = []
    most = max((len(gpu.links) for gpu in gpus), default=0)
    for gpu in gpus:
        gaps = [at for at in range(max([*gpu.links, *gpu.unread], default=-1) + 1) if at not in gpu.links]
        if gpu.all_down and not gpu.links:
            findings += _dark(gpu, gpus)
        elif gaps:
            links = listed(str(at) for at in gaps)
            findings.append(Finding(f"the output does not show the rate of GPU{gpu.index}'s NVLink {links}", AGAIN))
        elif not gpu.links and not gpu.none:
            findings.append(Finding(f"the output does not show the NVLinks of GPU{gpu.index}", AGAIN))
        elif 0 < len(gpu.links) < most:
            what = f"GPU{gpu.index} has {len(gpu.links)} NVLinks in the output where others have {most}."
            findings.append(Finding(what, AGAIN))
    return findings


def _dark(gpu: _GpuLines, gpus: list[_GpuLines]) -> list[Finding]:
    """Return the finding on a GPU with no link up; for a card without a bridge only if an identical one has links."""
    twins = [other.index for other in gpus if other.name == gpu.name and any(other.links.values())]
    if _SOLDERED.search(gpu.name):
        cure = "look for Xid errors in dmesg and whether nvidia-fabricmanager runs, then reset the GPU"
        return [Finding(f"no NVLink of GPU{gpu.index} is up", cure)]
    if twins:
        what = f"no NVLink of GPU{gpu.index} is up, but on GPU{twins[0]} of the same model some are"
        return [
            Finding(what, "if it has a bridge seat it again, and look for Xid 74 in dmesg; without one it has none")
        ]
    return []


def _of_gpus(gpus: list[_GpuLines], elided: bool) -> list[Finding]:
    """Return the finding on GPUs missing from the output between its first and its last."""
    present = {gpu.index for gpu in gpus}
    absent = [f"GPU{at}" for at in range(min(present, default=0), max(present, default=0)) if at not in present]
    if absent:
        return [Finding(f"the NVLinks of {listed(absent)} are not in the output", AGAIN)]
    if elided:
        return [Finding("parts of the output were left out by hand", AGAIN)]
    return []
