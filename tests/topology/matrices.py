"""Makes matrices, and writes them as machines, terminals and people do."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

UNDERLINE = "\x1b[4m", "\x1b[0m"
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
NICS = ("NIC{}", "mlx5_{}", "mlx4_{}", "mlx5_bond_{}", "rdmap16s{}", "cxi{}", "bnxt_re{}")
TITLES = {"cpus": "CPU Affinity", "numa": "NUMA Affinity", "gpu_numa": "GPU NUMA ID"}


@dataclass(repr=False)
class Truth:
    """What a matrix says; `tails` has the values of each GPU behind its words."""

    devices: list[str]
    words: dict[tuple[str, str], str]
    titles: list[str]
    tails: dict[str, list[str]]
    legend: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join(["", *self.lines()]).replace("\t", "→")

    def cells(self, row: str) -> list[str]:
        return [" X " if row == column else self.words[row, column] for column in self.devices]

    def lines(self, header_tab: bool = True, ansi: int = 0) -> list[str]:
        """The table as the driver prints it: tabs, and one more behind the NUMA node."""
        titles = [TITLES[title] for title in self.titles]
        header = "\t".join([*self.devices, *titles])
        start, end = ("", "") if ansi == 0 else UNDERLINE if ansi == 1 else ("[4m", "[0m")
        lines = [("\t" if header_tab else "") + start + header + end]
        for row in self.devices:
            tail = list(self.tails.get(row, []))
            if len(tail) == 3:
                tail.insert(2, "")
            lines.append("\t".join([row, *self.cells(row), *tail]))
        return lines


WORDS = st.sampled_from(["SYS", "NODE", "PHB", "PXB", "PIX", "SOC", "NV1", "NV2", "NV4", "NV12", "NV18"])


@st.composite
def truths(draw: st.DrawFn, known: bool = False) -> Truth:
    """Symmetric matrices of 1 to 16 GPUs and up to 12 NICs, some with a word that no driver has said yet."""
    gpus = [f"GPU{at}" for at in range(draw(st.integers(1, 16)))]
    if draw(st.integers(0, 5)) == 0:
        gpus = [f"{gpu}/GI{at}" for at, gpu in enumerate(gpus)]
    pattern = draw(st.sampled_from(NICS))
    order = draw(st.permutations(range(draw(st.integers(0, 12)))))
    devices = gpus + [pattern.format(at) for at in order]
    word = WORDS if known or draw(st.integers(0, 3)) else st.one_of(WORDS, st.sampled_from(["C2C", "<unknown>", "XNV"]))
    words = {}
    for at, a in enumerate(devices):
        for b in devices[at + 1 :]:
            words[a, b] = words[b, a] = draw(word)
    titles = list(TITLES)[: draw(st.integers(0, 3))]
    values = [
        draw(st.sampled_from(["0-23,48-71", "24-47,72-95", "0-127", "0-55,112-167", "0,2", "0-1279"])),
        draw(st.sampled_from(["0", "1", "7", "0-1", "N/A"])),
        draw(st.sampled_from(["N/A", "N/A", "2", "10"])),
    ]
    tails = {gpu: values[: len(titles)] for gpu in gpus} if titles else {}
    legend = {nic: f"mlx5_{at}" for at, nic in enumerate(devices) if nic.startswith("NIC")}
    return Truth(devices, words, titles, tails, legend)


def wrapped(lines: list[str], width: int, trim: bool) -> list[str]:
    """Lines as a terminal of this width shows them, broken anywhere; blanks at its right edge may be lost."""
    broken = []
    for line in lines:
        shown = line.expandtabs(8)
        parts = [shown[at : at + width] for at in range(0, len(shown), width)] or [""]
        broken += [part.rstrip() if trim else part for part in parts]
    return [line for line in broken if line.strip()]


def squeezed(lines: list[str], blanks: int) -> list[str]:
    """Lines whose tabs and runs of blanks became so many blanks."""
    return [(" " * blanks).join(line.replace("CPU Affinity", "CPU\xa0Affinity").split()) for line in lines]


PROMPT = "user@node:~$ nvidia-smi topo -m"
BEFORE = st.sampled_from(
    ["", PROMPT + "\n", "== GPU topology ==\n-----------\n", "```\n", "\ufeff", "Sat Nov 21 2026\n\n"]
)
AFTER = st.sampled_from(["", "```\n", "user@node:~$ \n", "\nulimit soft: 1024\n", "Done.\n+------+\n| GPU  Name |\n"])
