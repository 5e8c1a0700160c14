"""What is said of broken machines, and that healthy ones are left in peace."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from psctl.topology.facts import HostFacts, Nic
from psctl.topology.findings import Finding
from psctl.topology.host import host_graph
from psctl.topology.readers.matrix import read_matrix, read_peers
from psctl.topology.readers.nccl_xml import read_nccl
from psctl.topology.readers.nvlink import read_nvlink
from psctl.topology.readings import (
    Affinity,
    GpuRow,
    GpuTable,
    Matrix,
    NvlinkGpu,
    NvlinkStatus,
    PciDevice,
    PciTree,
    PeerMatrix,
    RdmaPort,
    RdmaPorts,
    Reading,
)

CAPTURED = Path(__file__).resolve().parent.parent / "captured"


def said(*readings: Reading, nics: tuple[Nic, ...] | None = None) -> list[str]:
    facts = None
    if nics is not None:
        facts = HostFacts("x86_64", 8, "", (), 1, nics, (), (), None, "", "")
    findings = host_graph.build_host_graph(readings, facts).findings
    assert all(one.what and one.cure for one in findings)
    return [one.what for one in findings if "where they lead" not in one.what]  # test_hostile.py holds that one


def table(*rows: dict[str, object]) -> GpuTable:
    return GpuTable(tuple(GpuRow(**{"index": i, "name": "NVIDIA L40S", **row}) for i, row in enumerate(rows)))  # type: ignore[arg-type]


def words(count: int, word: str = "PIX", numa: str = "") -> Matrix:
    devices = tuple(f"GPU{i}" for i in range(count))
    near = {one: Affinity(numa=numa) for one in devices}
    return Matrix(devices, dict.fromkeys(itertools.permutations(devices, 2), word), near)


def test_a_gpu_with_fewer_lanes_but_not_one_that_rests() -> None:
    rest = {"generation": 1, "generation_max": 4, "width": 16, "width_max": 16}
    assert said(table(rest, {**rest, "width": 4})) == ["GPU1 runs at x4 instead of x16: 25% of its PCIe bandwidth"]
    assert said(table(rest, rest)) == []


def test_lanes_come_from_the_list_of_pci_where_the_query_has_none() -> None:
    card = PciDevice("0000:00:03.0", 0x0302, 0x10DE, speed=2.5, speed_max=16.0, width=8, width_max=16)
    assert said(PciTree((card,))) == ["GPU0 runs at x8 instead of x16: 50% of its PCIe bandwidth"]


def test_a_gpu_in_an_older_slot_than_others_of_its_model() -> None:
    assert said(table({"generation_max": 4}, {"generation_max": 3})) == [
        "GPU1 supports PCIe 3, but GPUs of its model support PCIe 4"
    ]
    assert said(table({"generation_max": 4}, {"generation_max": 3, "name": "NVIDIA T4"})) == []


def status(*up: int, of: int = 12, name: str = "NVIDIA A100-SXM4-80GB") -> NvlinkStatus:
    return NvlinkStatus(
        tuple(NvlinkGpu(i, name, "", (25e9,) * count + (None,) * (of - count)) for i, count in enumerate(up))
    )


@pytest.mark.parametrize(
    ("reading", "what"),
    [(status(12, 12, 10), ["GPU2: 10 NVLinks are up, 12 on GPUs of the same model"]), (status(12, 12), []),
     (status(0, 0), ["no NVLink is up on 2 x NVIDIA A100-SXM4-80GB"]), (status(0, 0, name="NVIDIA A100-PCIE-40GB"), []),
     (status(4, 4, name="NVIDIA A100-PCIE-40GB"), []), (status(4, of=6), ["GPU0: 4 of 6 NVLinks are up"])],
)  # fmt: skip
def test_nvlinks_that_are_down(reading: NvlinkStatus, what: list[str]) -> None:
    assert said(reading) == what


def test_nvlinks_that_lead_nowhere() -> None:
    assert said(words(2, "NODE"), status(12, 12)) == [
        "NVLinks are up on 2 GPUs, yet the matrix joins no two of them by NVLink"
    ]
    assert said(words(4, "NV12"), status(12, 12, 12, 12)) == []


def test_a_gpu_with_fewer_links_to_the_switch() -> None:
    mesh = words(8, "NV12")
    worn = Matrix(mesh.devices, {pair: "NV10" if "GPU5" in pair else word for pair, word in mesh.words.items()})
    assert said(worn) == ["GPU5 has fewer NVLinks to the switch than the other GPUs (12)"]


@pytest.mark.parametrize("word", ["NS", "CNS", "GNS", "TNS", "DR", "U"])
def test_gpus_that_cannot_reach_each_other(word: str) -> None:
    devices = ("GPU0", "GPU1", "GPU2")
    peers = PeerMatrix(devices, {pair: "OK" if "GPU2" in pair else word for pair in itertools.permutations(devices, 2)})
    (what,) = said(peers)
    assert what.startswith(f"GPUs cannot copy to each other directly ({word}: ")
    assert what.endswith(": GPU0-GPU1")


def test_a_gpu_that_fell_off() -> None:
    assert said(words(2), table({}, {}, {})) == ["GPU2 is in the query, but not in the matrix"]
    assert said(words(3), table({}, {})) == ["GPU2 is in the matrix, but not in the query"]
    assert said(words(2), table({}, {})) == []


def test_instances() -> None:
    assert said(table({"mig": True}, {"mig": False})) == [
        "MIG is on for GPU0: its instances reach no other by NVLink or P2P"
    ]


def slot(speed: float, width: int, width_max: int = 16) -> PciTree:
    return PciTree((PciDevice("0000:00:03.0", 0x0200, 0x15B3, 0x101D, speed=speed, width=width, width_max=width_max),))


def port(rate: float | None, active: bool = True, bus: str = "0000:00:03.0", device: str = "mlx5_0") -> RdmaPort:
    return RdmaPort(device, 1, rate, active, "Ethernet", bus)


@pytest.mark.parametrize(
    ("tree", "rate", "what"),
    [(slot(8.0, 8), 12.5e9, ["mlx5_0's slot (8 GT/s, x8 instead of x16) carries 7.9 GB/s, its port 11.9 GB/s"]),
     (slot(8.0, 16), 25e9, ["mlx5_0's slot (8 GT/s, x16) carries 15.8 GB/s, its port 23.9 GB/s"]),
     (slot(16.0, 8), 12.5e9, []), (slot(8.0, 16), 12.5e9, [])],
)  # fmt: skip
def test_a_slot_that_is_too_narrow_for_its_port(tree: PciTree, rate: float, what: list[str]) -> None:
    assert said(tree, RdmaPorts((port(rate),))) == what


def test_ports_that_are_down_or_slower_than_identical_ones() -> None:
    tree = PciTree(tuple(PciDevice(f"0000:00:0{i}.0", 0x0200, 0x15B3, 0x101D) for i in (3, 4)))
    other = PciTree(tuple(PciDevice(f"0000:00:0{i}.0", 0x0200, 0x15B3, 0x1010 + i) for i in (3, 4)))
    slow = RdmaPorts((port(25e9), port(5e9, bus="0000:00:04.0", device="mlx5_1")))
    assert said(tree, slow) == ["mlx5_1 runs at 40 Gbit/s, an identical one at 200"]
    assert said(other, slow) == []
    assert said(RdmaPorts((port(25e9), port(None, active=False, device="mlx5_1")))) == ["RDMA ports are down: mlx5_1/1"]


def nic(name: str, speed: float, driver: str) -> Nic:
    return Nic(name, (f"10.0.{len(name)}.5/24",), speed=speed, driver=driver)


def test_a_port_that_negotiated_down_but_not_a_slow_one_by_design() -> None:
    fast = nic("eth10", 3.125e9, "mlx5_core")
    assert said(nics=(fast, nic("eth0", 0.125e9, "mlx5_core"))) == ["eth0 runs at 1 Gbit/s, an identical one at 25"]
    assert said(nics=(fast, nic("eno1", 0.125e9, "igb"))) == []
    assert said(nics=(nic("eth10", 50e9, "mlx5_core"), nic("eth0", 3.125e9, "mlx5_core"))) == []


def test_gpus_far_from_every_nic() -> None:
    rows = {("GPU0", "GPU1"): "SYS", ("GPU0", "NIC0"): "PIX", ("GPU1", "NIC0"): "SYS"}
    assert said(Matrix(("GPU0", "GPU1", "NIC0"), rows)) == ["every NIC is across processors (SYS) from GPU1"]


def test_a_virtual_machine_that_hides_where_things_sit() -> None:
    assert said(words(2, "SYS", "0")) == [
        "the matrix has SYS (across processors) for devices of one NUMA node: GPU0-GPU1"
    ]


def test_words_that_join_what_numa_nodes_part() -> None:
    near = {"GPU0": Affinity(numa="0"), "GPU1": Affinity(numa="1")}
    assert said(Matrix(("GPU0", "GPU1"), {("GPU0", "GPU1"): "NODE"}, near)) == [
        "the matrix has NODE (within one NUMA node) for devices of different nodes: GPU0-GPU1"
    ]


def test_words_that_no_set_of_processors_has() -> None:
    rows = {("GPU0", "GPU1"): "NODE", ("GPU1", "GPU2"): "NODE", ("GPU0", "GPU2"): "SYS"}
    assert said(Matrix(("GPU0", "GPU1", "GPU2"), rows)) == [
        "the matrix has NODE (within one NUMA node) for devices of different nodes: GPU1-GPU2"
    ]


SPOKEN_OF = {
    "a100x8-nv12-17nics": "one NUMA node", "a10x4-all-sys-2nics": "one NUMA node",
    "rtx4090x8-all-sys-2nics": "one NUMA node", "a100x8-nv12-4nics-distserve": "every NIC is across",
    "gpu4-nv4-pairs-sys-1nic": "every NIC is across", "h100nvl-x8-nv12-pairs-2nics": "every NIC is across",
    "k40x4-gdr-soc-mlx4": "every NIC is across", "k80x4-soc-slurm-mlx4": "every NIC is across",
    "v100x8-sxm2-1nic-dlperf": "every NIC is across",
}  # fmt: skip
"""Captured machines of which there is something to say."""


@pytest.mark.parametrize("path", sorted((CAPTURED / "topo-m").glob("*.txt")), ids=lambda path: path.stem)
def test_captured_machines_are_left_in_peace(path: Path) -> None:
    reading = read_matrix(path.read_text(errors="replace"))
    found = [one for one in host_graph.build_host_graph([reading]).findings if one not in reading.findings]
    assert [SPOKEN_OF[path.stem] in one.what for one in found] == [True] if path.stem in SPOKEN_OF else not found


@pytest.mark.parametrize(
    ("folder", "name", "what"),
    [("nvlink-s", "a6000x8-4links", []), ("nvlink-s", "h100-one-gpu-18links", []),
     ("nvlink-s", "v100x4-ppc64le-6links", []),
     ("nvlink-s", "rtx3090x2-4links-tabs", []), ("nvlink-s", "v100-ndv2-gpu3-snippet", ["GPU3: 4 of 6 NVLinks are up"]),
     ("p2p", "h100x8-read-ok", []), ("p2p", "pcie8-pix-node-sys-read-ok", []),
     ("p2p", "rtx2080ti-x2-prop-ns", ["GPUs cannot copy to each other directly (NS: not supported): GPU0-GPU1"])],
)  # fmt: skip
def test_captured_outputs_of_other_commands(folder: str, name: str, what: list[str]) -> None:
    text = (CAPTURED / folder / f"{name}.txt").read_text(errors="replace")
    reading = read_nvlink(text) if folder == "nvlink-s" else read_peers(text)
    assert said(reading) == what


def test_a_topology_file_whose_gpus_name_themselves() -> None:
    text = (CAPTURED / "nccl-xml" / "azure-ncv4-a100x4.xml").read_text()
    (what,) = said(read_nccl(text))
    assert what.startswith("the NVLinks of GPU0, GPU1, GPU2, GPU3 lead to itself")


def test_slots_without_a_description() -> None:
    (what,) = said(read_nccl((CAPTURED / "nccl-xml" / "aws-g5-48xl-a10gx8.xml").read_text()))
    assert what.startswith("9 PCI functions have no class")


def test_equal_findings_are_shown_once() -> None:
    twice = Finding("the fan is broken", "mend it")
    assert said(GpuTable((), (twice,)), PciTree((), (twice,))) == ["the fan is broken"]
