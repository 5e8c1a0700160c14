"""An output is known by what it says, whatever stands around it; nothing that a file holds is an error."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.findings import Finding
from psctl.topology.readers.recognise import decode, read_all
from psctl.topology.readings import (
    FailedOutput,
    GpuTable,
    Matrix,
    NcclTopology,
    NvlinkStatus,
    PciTree,
    PeerMatrix,
    RdmaPorts,
    Reading,
    RocmTopology,
    UnknownOutput,
)
from tests.desktop_time import desktop_seconds

CAPTURED = Path(__file__).parent.parent / "captured"
FOLDERS = {
    "topo-m": Matrix, "p2p": PeerMatrix, "nvlink-s": NvlinkStatus, "rocm": RocmTopology, "nccl-xml": NcclTopology,
    "errors": FailedOutput,
}  # fmt: skip
FILES = sorted(path for kind in FOLDERS for path in (CAPTURED / kind).glob("*.[tx][xm][tl]"))

TOPO = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tPIX\t0-31\t0
GPU1\tNV12\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\t X
"""
PEERS = """\
 \tGPU0\tGPU1
 GPU0\tX\tOK
 GPU1\tOK\tX

Legend:

  X    = Self
  OK   = Status Ok
  TNS  = Topology not supported
"""
LINKS = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n\t Link 0: 25 GB/s\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n\t Link 0: 25 GB/s\n"
LIST = "GPU 0: NVIDIA A100 (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n"
QUERY = "index, name, pci.bus_id\n0, NVIDIA A100, 00000000:07:00.0\n1, NVIDIA A100, 00000000:0F:00.0\n"
LSPCI = "17:01.0 PCI bridge: Intel Corporation Device 352a\n\tBus: primary=17, secondary=18, subordinate=1b\n"
TREE = "-[0000:00]-+-00.0\n           \\-01.0-[01]----00.0\n"
IBSTAT = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n\t\tLink layer: InfiniBand\n"
NETDEV = "mlx5_0 port 1 ==> ib0 (Up)\n"
XML = '<system version="1">\n<cpu numaid="0"><pci busid="0000:07:00.0"/></cpu>\n</system>\n'
ROCM = (CAPTURED / "rocm" / "mi300a-x4-xgmi.txt").read_text()
AMD = """\
LINK TYPE TABLE:
             0000:03:00.0 0000:0c:00.0
0000:03:00.0 SELF         PCIE
0000:0c:00.0 PCIE         SELF
"""
ERROR = "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error\n"
BANNER = (
    "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15 |\n|   0  NVIDIA A100   On  |   00000000:07:00.0 Off |  0 |\n"
)
LOG = "==============NVSMI LOG==============\n\nGPU 00000000:07:00.0\n    Product Name  : NVIDIA A100\n"
OUTPUTS = {
    "topo": (TOPO, Matrix), "peers": (PEERS, PeerMatrix), "links": (LINKS, NvlinkStatus), "list": (LIST, GpuTable),
    "query": (QUERY, GpuTable), "lspci": (LSPCI, PciTree), "tree": (TREE, PciTree), "ibstat": (IBSTAT, RdmaPorts),
    "netdev": (NETDEV, RdmaPorts), "xml": (XML, NcclTopology), "rocm": (ROCM, RocmTopology), "amd": (AMD, RocmTopology),
    "log": (LOG, GpuTable), "error": (ERROR, FailedOutput), "banner": (BANNER, GpuTable),
}  # fmt: skip


def read(text: str) -> Reading:
    """Read one output; never raises.

    Returns:
        What it is: the first known output in the text, with the findings of error lines that stand around it. Text of
        errors alone is a Failure, text in which nothing is known Unknown.
    """
    all_ = read_all(text)
    known = [one for one in all_ if not isinstance(one, FailedOutput | UnknownOutput)]
    failed = next((one for one in all_ if isinstance(one, FailedOutput)), None)
    if not known:
        return failed or all_[0]
    first = known[0]
    if failed:
        merged: tuple[Finding, ...] = tuple(dict.fromkeys((*first.findings, *failed.findings)))
        return msgspec.structs.replace(first, findings=merged)
    return first


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}-{path.stem}" for path in FILES])
def test_every_captured_output_is_known_by_its_content(path: Path) -> None:
    text = decode(path.read_bytes())
    expected = FOLDERS[path.parent.name] if text.strip() else UnknownOutput
    assert [type(one) for one in read_all(text)] == [expected]
    assert type(read(text)) is expected


@pytest.mark.parametrize(("text", "kind"), OUTPUTS.values(), ids=OUTPUTS)
def test_banners_prompts_and_colours_around_an_output_do_no_harm(text: str, kind: type) -> None:
    around = f"🔗 GPU topology of node-a\n=====\n\x1b[1mroot@node-a:~#\x1b[0m nvidia-smi\n{text}\n✅ done\n"
    assert isinstance(read(around), kind)
    assert isinstance(read(text.replace("\n", "\r\n")), kind)


@pytest.mark.parametrize(
    "line",
    ["$ nvidia-smi topo -m", "[me@node ~]$ sudo nvidia-smi topo -p2p r", "PS C:\\> nvidia-smi nvlink -s", "+ lspci -tv",
     "!nvidia-smi topo -m", "=== nvidia-smi nvlink -s ===", "nvidia-smi topo --matrix:", "== status 0"],
)  # fmt: skip
def test_a_command_line_ends_the_output_before_it(line: str) -> None:
    first = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n"
    found = read_all(f"{first}{line}\n\t Link 0: 25 GB/s\n")
    assert [type(one) for one in found] == [GpuTable, NvlinkStatus]


def test_a_mangled_word_does_not_make_another_matrix() -> None:
    assert isinstance(read(PEERS.replace("GPU0\tX\tOK", "GPU0\tX\tO K")), PeerMatrix)
    assert isinstance(read(TOPO.replace("NV12", "OK")), Matrix)


@pytest.mark.parametrize("before", ["> ", "# ", "node-7: ", "// "])
@pytest.mark.parametrize("name", sorted(name for name, (text, _) in OUTPUTS.items() if text.count("\n") > 1))
def test_what_stands_before_every_line_is_left_out(name: str, before: str) -> None:
    text, kind = OUTPUTS[name]
    found = read("".join(before + line if line.strip() else line for line in text.splitlines(keepends=True)))
    assert isinstance(found, kind)
    assert found == read(text)


@given(st.lists(st.sampled_from(sorted(OUTPUTS.keys() - {"netdev"})), min_size=1, unique=True), st.booleans())
def test_several_outputs_in_one_file_come_apart(names: list[str], prompts: bool) -> None:
    between = "user@host:~$ nvidia-smi topo -m\n" if prompts else "\n"
    found = read_all("".join(between + OUTPUTS[name][0] for name in names))
    kinds = sorted(OUTPUTS[name][1].__name__ for name in names)
    assert sorted(type(one).__name__ for one in found) == kinds


def test_the_same_ports_in_the_output_of_two_tools_are_joined() -> None:
    (found,) = read_all(IBSTAT + NETDEV)
    assert isinstance(found, RdmaPorts)
    assert [(port.rate, port.interface) for port in found.ports] == [(50e9, "ib0")]


def test_the_same_command_run_twice_gives_two_readings() -> None:
    for text in (TOPO, PEERS, LINKS, LIST, QUERY, ROCM):
        assert len(read_all(text + text)) == 2


def test_errors_around_an_output_are_its_findings() -> None:
    found = read(ERROR + QUERY)
    assert isinstance(found, GpuTable)
    assert [finding.what for finding in found.findings] == [ERROR.strip()]
    assert len(found.gpus) == 2
    table, failure = read_all(ERROR + QUERY)
    assert isinstance(failure, FailedOutput) and isinstance(table, GpuTable)
    assert table.findings == ()


def test_a_matrix_of_one_gpu_is_known_by_its_header_or_legend() -> None:
    assert isinstance(read("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-19\t0\n"), Matrix)
    assert isinstance(read(" \tGPU0\n GPU0\tX\n\nLegend:\n  X    = Self\n  OK   = Status Ok\n"), PeerMatrix)


def test_a_matrix_with_unknown_words_is_a_matrix() -> None:
    found = read(TOPO.replace("SYS", "QQQ"))
    assert isinstance(found, Matrix)
    assert found.words["GPU1", "NIC0"] == "QQQ"


def test_amd_cards_and_their_topology_are_two_readings() -> None:
    cards = "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300A\nGPU[0]\t\t: PCI Bus: 0000:01:00.0\n"
    text = ROCM.replace("================================== End of ROCm SMI Log", cards + "=== End of ROCm SMI Log")
    assert [type(one) for one in read_all(text)] == [RocmTopology, GpuTable]


@pytest.mark.parametrize(
    ("text", "first"),
    [("", ""), ("\n\n", ""), ("hello\nworld", "hello"), ("Legend:\n  X = Self", "Legend:"),
     ("<nvidia_smi_log><gpu/></nvidia_smi_log>", "<nvidia_smi_log><gpu/></nvidia_smi_log>"),
     ("h:1:1 [0] NCCL INFO Channel 00/24 :    0   1   2", "h:1:1 [0] NCCL INFO Channel 00/24 :    0   1   2")],
)  # fmt: skip
def test_text_in_which_nothing_is_known(text: str, first: str) -> None:
    assert read(text) == UnknownOutput(first)
    assert read_all(text) == (UnknownOutput(first),)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_every_way_to_store_text(encoding: str) -> None:
    text = "GPU0\tGPU1\r\n✅ fertig\r\n"
    assert decode((TOPO.replace("\n", "\r\n") + text).encode(encoding)) == TOPO + text.replace("\r\n", "\n")


def test_bytes_that_are_no_utf8_and_zeros() -> None:
    assert decode(b"GPU0 \xb5s\0\n") == "GPU0 µs\n"
    assert decode("fertig ✅".encode()[:-1]) == "fertig "
    assert decode(b"") == ""
    assert decode(b"a\rb\r\r\nc") == "a\nb\nc"


@given(st.binary(max_size=400))
def test_any_bytes_are_read(data: bytes) -> None:
    read_all(decode(data))


@given(st.sampled_from(sorted(OUTPUTS)), st.data())
def test_cut_and_garbled_outputs_are_read_in_part_or_not_at_all(name: str, data: st.DataObject) -> None:
    text = OUTPUTS[name][0]
    at, lost = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 30))
    put = data.draw(st.text("GPUNIC01:.,=<>[]/ \t\n\x1b\0X", max_size=6))
    for changed in (text[:at], text[at:], text[:at] + put + text[at + lost :]):
        read_all(changed)


def test_large_machines_and_long_lines_take_no_time() -> None:
    gpus, nics = [f"GPU{n}" for n in range(16)], [f"NIC{n}" for n in range(10)]
    rows = ["\t" + "\t".join([*gpus, *nics, "CPU Affinity", "NUMA Affinity"])]
    for row in [*gpus, *nics]:
        cells = [
            " X " if row == column else "NV18" if row[0] == column[0] == "G" else "SYS" for column in [*gpus, *nics]
        ]
        rows.append("\t".join([row, *cells, *(["0-63", "0"] if row in gpus else [])]))
    links = "".join(f"GPU {n}: H100 (UUID: GPU-{n})\n" + "\t Link 0: 26.562 GB/s\n" * 18 for n in range(16))
    begin = time.process_time()
    found = read_all("\n".join(rows) + "\n" + links + "x" * 3_000_000 + "\n" + ": port 1 " * 200_000)
    assert [type(one) for one in found] == [Matrix, NvlinkStatus]
    assert desktop_seconds(time.process_time() - begin) < 3


@pytest.mark.parametrize("bold", ["", "**"])
def test_a_matrix_as_a_drawn_table_is_the_same_matrix(bold: str) -> None:
    plain = read("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV2\t0-31\nGPU1\tNV2\t X \t32-63\n")
    drawn = read(
        "| | GPU0 | GPU1 | CPU Affinity |\n|---|:-:|---|---|\n"
        f"| {bold}GPU0{bold} | X | NV2 | 0-31 |\n| {bold}GPU1{bold} | NV2 | X | 32-63 |\n"
    )
    assert isinstance(plain, Matrix)
    assert drawn == plain
