"""Readings of a host become one graph: what stands as an edge, what as a relation, what only follows."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psctl.topology.facts import Gpu, HostFacts, Nic, NumaNode
from psctl.topology.findings import Finding
from psctl.topology.graph import HostGraph, Link, bonded
from psctl.topology.host import host_graph
from psctl.topology.readers.matrix import read_matrix
from psctl.topology.readers.nccl_xml import read_nccl
from psctl.topology.readers.rocm import read_rocm
from psctl.topology.readings import (
    Affinity,
    FailedOutput,
    GpuRow,
    GpuTable,
    Matrix,
    NcclGpu,
    NcclTopology,
    NvlinkGpu,
    NvlinkStatus,
    PciDevice,
    PciTree,
    RdmaPort,
    RdmaPorts,
    RocmTopology,
)

CAPTURED = Path(__file__).resolve().parent.parent / "captured"


def matrix(rows: dict[str, str], *, numa: str = "") -> Matrix:
    """Words by pair ("GPU0 GPU1"), both ways; `numa` a node for each device."""
    words = {(a, b): word for pair, word in rows.items() for a, b in itertools.permutations(pair.split())}
    devices = tuple(dict.fromkeys(end for pair in rows for end in pair.split()))
    affinity = {one: Affinity(numa=node) for one, node in zip(devices, numa.split(), strict=False)}
    return Matrix(devices, words, affinity)


def all_to_all(count: int, word: str, numa: str = "") -> Matrix:
    pairs = itertools.combinations(range(count), 2)
    return matrix({f"GPU{a} GPU{b}": word for a, b in pairs}, numa=numa)


def captured(name: str) -> Matrix:
    return read_matrix((CAPTURED / "topo-m" / f"{name}.txt").read_text(errors="replace"))


def link(graph: HostGraph, a: str, b: str) -> Link:
    found = [one for one in graph.links if one.ends == {a, b}]
    assert len(found) == 1, f"{a}-{b}: {found}"
    return found[0]


def up(graph: HostGraph, ident: str) -> str:
    return " ".join(one.b for one in graph.edges if one.a == ident and one.type == "PCIe")


@pytest.mark.parametrize("name", ["dgx1v-v100x8-mlx5x4-tabs", "dgx1v-v100x8-mlx5x4-ucxpy"])
def test_a_dgx1v_has_24_links_six_a_gpu_and_no_switch_of_nvlink(name: str) -> None:
    graph = host_graph.build_host_graph([captured(name)])
    bundles = [one for one in graph.links if bonded(one.type)]
    units = Counter[str]()
    for one in bundles:
        assert (one.switched, one.edge) == (False, True)
        assert one.bandwidth == bonded(one.type) * 25e9
        units.update({one.a: one.width, one.b: one.width})
    assert sum(one.width for one in bundles) == 24
    assert set(units.values()) == {6}
    assert link(graph, "GPU0", "GPU5").type == "SYS"
    assert link(graph, "GPU0", "GPU5").bandwidth == 16e9  # by PCIe: no GPU passes it on
    assert [up(graph, f"GPU{i}") for i in range(8)] == ["SW0", "SW0", "SW1", "SW1", "SW2", "SW2", "SW3", "SW3"]
    assert [up(graph, f"SW{i}") for i in range(4)] == ["CPU0", "CPU0", "CPU1", "CPU1"]
    assert not graph.findings


@pytest.mark.parametrize(
    ("count", "word", "through"),
    [(8, "NV12", True), (8, "NV18", True), (8, "NV8", True), (16, "NV6", True), (4, "NV18", True), (4, "NV4", False),
     (2, "NV12", False), (2, "NV4", False), (2, "NV18", False), (4, "NV6", False), (4, "NV7", True)],
)  # fmt: skip
def test_nvn_is_switched_when_a_gpu_has_not_as_many_links(count: int, word: str, through: bool) -> None:
    graph = host_graph.build_host_graph([all_to_all(count, word)])
    pairs = [one for one in graph.links if bonded(one.type)]
    ports = [one for one in graph.edges if one.type == "NVLink"]
    assert len(pairs) == count * (count - 1) // 2
    assert {one.switched for one in pairs} == {through}
    assert {one.bandwidth for one in pairs} == {bonded(word) * 25e9}
    assert [(one.a, one.b) for one in ports] == ([(f"GPU{i}", "NVSW0") for i in range(count)] if through else [])
    assert all(one.bandwidth == bonded(word) * 25e9 for one in ports)


def test_the_number_of_links_that_nvlink_s_lists_decides() -> None:
    words = all_to_all(4, "NV4")
    twelve = NvlinkStatus(tuple(NvlinkGpu(i, "NVIDIA A100", "", (25e9,) * 12) for i in range(4)))
    eight = NvlinkStatus(tuple(NvlinkGpu(i, "NVIDIA A100", "", (25e9,) * 8) for i in range(4)))
    assert link(host_graph.build_host_graph([words, twelve]), "GPU0", "GPU1").switched is False
    assert link(host_graph.build_host_graph([words, eight]), "GPU0", "GPU1").switched is True


def test_a_list_of_links_that_is_cut_makes_no_switch() -> None:
    links = NvlinkStatus(tuple(NvlinkGpu(i, "Tesla V100", "", (25e9,) * count) for i, count in enumerate((6, 6, 2))))
    assert {
        one.switched for one in host_graph.build_host_graph([all_to_all(3, "NV3"), links]).links if bonded(one.type)
    } == {False}


def test_two_separate_fabrics_are_two_switches() -> None:
    rows = {f"GPU{a} GPU{b}": "NV12" if (a < 4) == (b < 4) else "SYS" for a, b in itertools.combinations(range(8), 2)}
    graph = host_graph.build_host_graph([matrix(rows)])
    assert [one.id for one in graph.of_kind("switch")] == ["NVSW0", "NVSW1"]
    assert link(graph, "GPU5", "NVSW1").bandwidth == 300e9
    assert link(graph, "GPU0", "GPU4").bandwidth == 16e9


def test_the_rate_of_a_link_by_the_name_of_the_gpu() -> None:
    p100 = GpuTable(tuple(GpuRow(i, "Tesla P100-SXM2-16GB") for i in range(2)))
    assert link(host_graph.build_host_graph([all_to_all(2, "NV1"), p100]), "GPU0", "GPU1").bandwidth == 20e9
    bridge = NvlinkStatus(tuple(NvlinkGpu(i, "NVIDIA GeForce RTX 3090", "", (14.062e9,) * 4) for i in range(2)))
    assert link(host_graph.build_host_graph([all_to_all(2, "NV4"), bridge]), "GPU0", "GPU1").bandwidth == 56.25e9


def test_four_gpus_behind_one_switch_share_its_one_way_up() -> None:
    graph = host_graph.build_host_graph([all_to_all(4, "PIX")])
    assert [(one.a, one.b, one.bandwidth) for one in graph.edges] == [
        ("SW0", "CPU0", 16e9), *((f"GPU{i}", "SW0", 16e9) for i in range(4)),
    ]  # fmt: skip
    assert all(one.derived for one in graph.edges)
    assert {one.bandwidth for one in graph.relations} == {16e9}
    assert {one.id: one.derived for one in graph.devices} == {
        "CPU0": True, "SW0": True, "GPU0": False, "GPU1": False, "GPU2": False, "GPU3": False,
    }  # fmt: skip


def test_pxb_is_a_switch_below_a_switch_node_another_slot_sys_another_processor() -> None:
    graph = host_graph.build_host_graph([captured("a100x8-nv12-17nics")])
    assert (up(graph, "NIC0"), up(graph, "NIC1"), up(graph, "NIC2")) == ("SW1", "SW1", "SW2")
    assert (up(graph, "GPU0"), up(graph, "SW1"), up(graph, "SW2"), up(graph, "SW0")) == ("SW0", "SW0", "SW0", "CPU0")
    graph = host_graph.build_host_graph([captured("h100nvl-x8-nv12-pairs-2nics")])
    assert up(graph, "NIC0") == up(graph, "NIC1") == "SW0"
    assert [one.name for one in graph.of_kind("switch")] == ["PCIe card or switch"]
    assert (up(graph, "SW0"), up(graph, "GPU1"), up(graph, "GPU7")) == ("CPU0", "CPU0", "CPU1")
    assert link(graph, "CPU0", "CPU1").type == "SMP"


def test_all_words_stand_as_they_are_the_unknown_too() -> None:
    graph = host_graph.build_host_graph([matrix({"GPU0 GPU1": "XYZ", "GPU0 NIC0": "SOC", "GPU1 NIC0": "NODE"})])
    assert [(one.a, one.b, one.type, one.switched) for one in graph.relations] == [
        ("GPU0", "GPU1", "XYZ", None), ("GPU0", "NIC0", "SOC", None), ("GPU1", "NIC0", "NODE", None),
    ]  # fmt: skip


def test_a_row_that_is_missing_is_served_by_the_column() -> None:
    whole = matrix({"GPU0 GPU1": "SYS", "GPU0 NIC0": "PXB", "GPU1 NIC0": "SYS", "GPU0 NIC1": "SYS", "GPU1 NIC1": "PIX"})
    cut = Matrix(whole.devices, {pair: word for pair, word in whole.words.items() if not pair[0].startswith("NIC")})
    assert host_graph.build_host_graph([cut]).links == host_graph.build_host_graph([whole]).links


def test_words_that_differ_by_direction_derive_nothing() -> None:
    graph = host_graph.build_host_graph([Matrix(("GPU0", "GPU1"), {("GPU0", "GPU1"): "PIX", ("GPU1", "GPU0"): "SYS"})])
    assert link(graph, "GPU0", "GPU1").type == "PIX"
    assert graph.of_kind("switch") == ()


def test_what_contradicts_itself_is_reported_and_nothing_is_invented() -> None:
    graph = host_graph.build_host_graph([matrix({"GPU0 GPU1": "PIX", "GPU1 GPU2": "PIX", "GPU0 GPU2": "PHB"})])
    assert [one.type for one in graph.relations] == ["PIX", "PHB", "PIX"]
    assert (up(graph, "GPU0"), up(graph, "GPU1"), up(graph, "GPU2")) == ("SW0", "SW0", "CPU0")
    assert "GPU1-GPU2 (PIX)" in graph.findings[0].what


def test_instances_of_mig_share_the_slot_of_their_gpu() -> None:
    graph = host_graph.build_host_graph(
        [matrix({"GPU0/GI0 GPU0/GI1": "PIX", "GPU0/GI0 GPU1": "SYS", "GPU0/GI1 GPU1": "SYS"})]
    )
    assert (up(graph, "GPU0/GI0"), up(graph, "GPU0/GI1"), up(graph, "GPU1")) == ("SW0", "SW0", "CPU1")
    assert [one.name for one in graph.of_kind("switch")] == ["slot of GPU0"]
    assert any("MIG is on for GPU0" in finding.what for finding in graph.findings)


def test_a_matrix_of_pcie_alone_shows_what_nvlink_hides() -> None:
    graph = host_graph.build_host_graph([all_to_all(2, "PIX"), all_to_all(2, "NV4")])
    assert link(graph, "GPU0", "GPU1").type == "NV4"
    assert (up(graph, "GPU0"), up(graph, "GPU1")) == ("SW0", "SW0")


BUSES = GpuTable((GpuRow(0, "NVIDIA L40S", bus="0000:03:00.0"), GpuRow(1, "NVIDIA L40S", bus="0000:04:00.0")))
"""Two GPUs below one switch."""

PCI = PciTree((
    PciDevice("0000:00:01.0", 0x0604, speed_max=16.0, width=16),
    PciDevice("0000:01:00.0", 0x0604, path=("0000:00:01.0",), speed_max=16.0, width=8),
    PciDevice("0000:02:00.0", 0x0604, path=("0000:00:01.0", "0000:01:00.0"), speed_max=16.0, width=16),
    PciDevice("0000:02:01.0", 0x0604, path=("0000:00:01.0", "0000:01:00.0"), speed_max=8.0, width=16),
    PciDevice("0000:03:00.0", 0x0302, 0x10DE, path=("0000:00:01.0", "0000:01:00.0", "0000:02:00.0"), speed=2.5,
              speed_max=16.0, width=16, numa=1),
    PciDevice("0000:04:00.0", 0x0302, 0x10DE, path=("0000:00:01.0", "0000:01:00.0", "0000:02:01.0"), speed=2.5,
              speed_max=16.0, width=16, numa=1),
    PciDevice("0000:05:00.0", 0x0300, 0x1A03, path=("0000:00:1c.0",)),
))  # fmt: skip


def test_the_tree_that_the_host_lists_replaces_the_derived_one() -> None:
    graph = host_graph.build_host_graph([all_to_all(2, "PHB"), BUSES, PCI])
    assert [(one.a, one.b, round(one.bandwidth / 1e9, 1), one.derived) for one in graph.edges] == [
        ("SW0", "CPU1", 15.8, False),  # gen 4, but the port up has 8 lanes
        ("GPU0", "SW0", 31.5, False),  # at rest it runs at 2.5 GT/s
        ("GPU1", "SW0", 15.8, False),  # its slot can do gen 3
    ]
    switch = graph.device("SW0")
    assert switch is not None
    assert (switch.bus, switch.derived) == ("0000:01:00.0", False)
    assert link(graph, "GPU0", "GPU1").bandwidth == pytest.approx(15.754e9, rel=1e-3)


def test_gpus_of_a_list_alone_are_numbered_by_their_address_and_a_boards_display_is_none() -> None:
    graph = host_graph.build_host_graph([PCI])
    assert [(one.id, one.bus) for one in graph.of_kind("gpu")] == [("GPU0", "0000:03:00.0"), ("GPU1", "0000:04:00.0")]


def test_a_device_without_an_address_hangs_beside_the_one_it_is_near() -> None:
    words = matrix({"GPU0 GPU1": "PIX", "GPU0 NIC0": "PIX", "GPU1 NIC0": "PIX"})
    assert up(host_graph.build_host_graph([words, BUSES, PCI]), "NIC0") == "SW0"


def test_plain_lspci_has_no_bridges_above_a_device() -> None:
    flat = PciTree((PciDevice("0000:03:00.0", 0x0302, 0x10DE), PciDevice("0000:04:00.0", 0x0302, 0x10DE)))
    assert up(host_graph.build_host_graph([all_to_all(2, "PIX"), BUSES, flat]), "GPU0") == "SW0"


def test_a_slot_has_the_rate_of_the_query() -> None:
    rows = tuple(GpuRow(i, generation=1, generation_max=4, width=width) for i, width in enumerate((16, 8)))
    graph = host_graph.build_host_graph([all_to_all(2, "PHB"), GpuTable(rows)])
    assert link(graph, "GPU0", "CPU0").bandwidth == pytest.approx(31.508e9, rel=1e-3)
    assert link(graph, "GPU1", "CPU0").bandwidth == pytest.approx(15.754e9, rel=1e-3)


def xml(name: str) -> HostGraph:
    return host_graph.build_host_graph([read_nccl((CAPTURED / "nccl-xml" / f"{name}.xml").read_text())])


def test_an_nccl_file_with_a_bridge_of_nvlink() -> None:
    graph = xml("azure-nc48v4-a100x2")
    assert (link(graph, "GPU0", "GPU1").type, link(graph, "GPU0", "GPU1").bandwidth) == ("NV12", 300e9)
    assert [(one.id, one.kind, one.numa) for one in graph.devices] == [
        ("CPU0", "cpu", 0), ("CPU1", "cpu", 1), ("GPU0", "gpu", 0), ("GPU1", "gpu", 1), ("eth0", "nic", 0),
    ]  # fmt: skip
    assert link(graph, "CPU0", "CPU1").type == "xGMI"


def test_an_nccl_file_with_switches_of_pcie() -> None:
    graph = xml("azure-ndv5-h100x8")
    assert (len(graph.of_kind("gpu")), len(graph.of_kind("nic")), len(graph.of_kind("switch"))) == (8, 8, 8)
    assert link(graph, "SW0", "CPU0").bandwidth == pytest.approx(63.015e9, rel=1e-3)
    assert up(graph, "GPU4") == up(graph, "NIC4") == "SW4"


def test_a_bridge_that_a_virtual_machine_emulates_has_no_rate_of_its_own() -> None:
    assert link(xml("ibm-vela-a100x8"), "SW0", "CPU0").bandwidth == pytest.approx(31.508e9, rel=1e-3)


def test_an_rccl_file_with_links_of_amd() -> None:
    graph = xml("rccl-16p1h-xgmi")
    assert sum(one.type == "xGMI" and one.a.startswith("GPU") for one in graph.edges) == 28  # 56 ends
    assert link(graph, "GPU0", "GPU1").bandwidth == 200e9
    assert (link(graph, "SW1", "SW0").type, up(graph, "SW0")) == ("PCIe", "CPU0")


def test_nvlinks_of_an_nccl_file_to_a_switch() -> None:
    at = [f"0000:{0x10 + i:02x}:00.0" for i in range(3)]
    ports = (("0000:c0:00.0", 6, 0x0680), ("0000:c1:00.0", 6, 0x0680))
    gpus = tuple(NcclGpu(i, bus, nvlinks=ports) for i, bus in enumerate(at))
    graph = host_graph.build_host_graph(
        [NcclTopology(tuple(PciDevice(bus, 0x0302, numa=0) for bus in at), gpus, (), {0: "x86_64"})]
    )
    assert [(one.a, one.b, one.type, one.switched) for one in graph.relations] == [
        ("GPU0", "GPU1", "NV12", True), ("GPU0", "GPU2", "NV12", True), ("GPU1", "GPU2", "NV12", True),
    ]  # fmt: skip
    assert link(graph, "GPU2", "NVSW0").bandwidth == 300e9


def test_the_pairs_of_rocm_smi() -> None:
    graph = host_graph.build_host_graph([read_rocm((CAPTURED / "rocm" / "mi300a-x4-xgmi.txt").read_text())])
    assert [one.type for one in graph.edges if one.a.startswith("GPU") and one.b.startswith("GPU")] == ["xGMI"] * 6
    graph = host_graph.build_host_graph([read_rocm((CAPTURED / "rocm" / "mi50x4-pcie.txt").read_text())])
    assert [(one.type, one.bandwidth) for one in graph.relations] == [("PCIE", 16e9)] * 6
    far = RocmTopology(("GPU0", "GPU1"), {("GPU0", "GPU1"): "XGMI"}, hops={("GPU0", "GPU1"): 2})
    assert [one.type for one in host_graph.build_host_graph([far]).relations] == ["XGMI"]


def facts(**other: object) -> HostFacts:
    some = {
        "machine": "x86_64", "cores": 64, "cpu": "AMD EPYC 7282 16-Core",
        "numa": (NumaNode(0, 32), NumaNode(1, 32)), "memory": 1 << 38, "nics": (),
        "gpus": (), "findings": (), "time": None, "default_interface": "", "connected": "",
    }  # fmt: skip
    return HostFacts(**{**some, **other})  # type: ignore[arg-type]


def test_a_host_without_any_output_of_gpus() -> None:
    nics = (
        Nic("eth0", ("10.0.0.5/24",), speed=3.125e9, driver="mlx5_core", numa=1),
        Nic("lo", ("127.0.0.1/8",), kind="loopback"), Nic("docker0", ("172.17.0.1/16",), kind="bridge"),
        Nic("eth1", (), speed=1e9), Nic("eth2", ("10.1.0.5/24",), up=False),
        Nic("wg0", ("10.9.0.1/24",), kind="virtual"),
    )  # fmt: skip
    graph = host_graph.build_host_graph([], facts(nics=nics))
    assert [(one.id, one.kind, one.cores) for one in graph.devices] == [
        ("CPU0", "cpu", 32), ("CPU1", "cpu", 32), ("eth0", "nic", None), ("wg0", "nic", None),
    ]  # fmt: skip
    eth0 = graph.device("eth0")
    assert eth0 is not None
    assert (eth0.addresses, eth0.bandwidth, eth0.numa) == (("10.0.0.5/24",), pytest.approx(2.9875e9), 1)
    assert (up(graph, "eth0"), link(graph, "CPU0", "CPU1").type) == ("CPU1", "xGMI")
    assert (link(graph, "wg0", "CPU0").type, link(graph, "wg0", "CPU0").bandwidth) == ("Ethernet", 16e9)
    assert not any(one.derived for one in graph.devices)
    assert not graph.findings


def test_one_processor_has_the_hosts_cores_and_memory() -> None:
    cpu = host_graph.build_host_graph([], facts(numa=(), cores=4)).device("CPU0")
    assert cpu is not None
    assert (cpu.cores, cpu.memory, cpu.numa) == (4, 1 << 38, None)


def test_gpus_that_only_the_probe_names_hang_on_their_processor() -> None:
    gpus = tuple(Gpu(i, "NVIDIA A10", 24 << 30, "550", f"0000:{i}3:00.0", numa=i) for i in range(2))
    graph = host_graph.build_host_graph([], facts(gpus=gpus, findings=(Finding("a fan is broken", "mend it"),)))
    assert (up(graph, "GPU0"), up(graph, "GPU1")) == ("CPU0", "CPU1")
    assert graph.findings == (Finding("a fan is broken", "mend it"),)


def test_an_interface_and_its_rdma_device_are_one() -> None:
    words = Matrix(("GPU0", "NIC0"), {("GPU0", "NIC0"): "PIX"}, legend={"NIC0": "mlx5_0"})
    ports = RdmaPorts((
        RdmaPort("mlx5_0", 1, 25e9, True, "Ethernet", "0000:3b:00.0", "eth1", 0),
        RdmaPort("mlx5_1", 1, 25e9, True, "Ethernet", "0000:5e:00.0", "eth2", 1),
        RdmaPort("mlx5_2", 1, 50e9, True, "InfiniBand", "0000:af:00.0"),
    ))  # fmt: skip
    nics = tuple(Nic(f"eth{i}", (f"10.0.{i}.5/24",), speed=25e9, driver="mlx5_core") for i in range(3))
    graph = host_graph.build_host_graph([words, ports], facts(nics=nics))
    assert [(one.id, one.name, one.interface, one.addresses) for one in graph.of_kind("nic")] == [
        ("NIC0", "mlx5_0", "eth1", ("10.0.1.5/24",)),
        ("eth2", "mlx5_1", "eth2", ("10.0.2.5/24",)),
        ("mlx5_2", "mlx5_2", "", ()),
        ("eth0", "mlx5_core", "eth0", ("10.0.0.5/24",)),
    ]


def test_without_a_legend_nics_and_rdma_devices_of_equal_number_are_the_same() -> None:
    words = matrix({"GPU0 NIC0": "PIX", "GPU0 NIC1": "NODE"})
    ports = RdmaPorts(tuple(RdmaPort(f"mlx5_{i}", 1, 25e9, True, "InfiniBand") for i in (10, 2)))
    assert [(one.id, one.name) for one in host_graph.build_host_graph([words, ports]).of_kind("nic")] == [
        ("NIC0", "mlx5_2"), ("NIC1", "mlx5_10"),
    ]  # fmt: skip


def test_the_message_of_a_broken_driver_is_passed_on() -> None:
    said = Finding("Failed to initialize NVML: Driver/library version mismatch", "reboot the host")
    graph = host_graph.build_host_graph([FailedOutput((said,))])
    assert graph.findings == (said,)
    assert graph.devices == ()


FILES = sorted((CAPTURED / "topo-m").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_captured_matrix_has_its_pairs_and_hangs_together(path: Path) -> None:
    known = json.loads(path.with_suffix(".json").read_text())
    matrix = captured(path.stem)
    graph = host_graph.build_host_graph([matrix])
    assert len(graph.of_kind("gpu")) == known["gpu_count"]
    assert len(graph.of_kind("nic")) == known["nic_count"]
    for pair, word in known["pairs"].items():
        assert link(graph, *pair.split("-")).type == word
    sound(graph, matrix)


def sound(graph: HostGraph, matrix: Matrix) -> None:
    """Each pair once with its word, all devices joined, no pair faster than its ends."""
    stated = Counter(one.ends for one in graph.links if not one.derived)
    words = {frozenset(pair) for pair in matrix.words}
    assert set(stated) == words
    assert set(stated.values()) <= {1}
    for one in graph.links:
        if not one.derived:
            both = {matrix.words.get((one.a, one.b)), matrix.words.get((one.b, one.a))} - {None}
            assert one.type in both
    joined = networkx.Graph((one.a, one.b) for one in graph.edges)
    joined.add_nodes_from(one.id for one in graph.devices)
    assert networkx.is_connected(joined)
    own = Counter[str]()
    for one in graph.edges:
        assert one.bandwidth > 0
        own.update({one.a: int(one.bandwidth), one.b: int(one.bandwidth)})
    for one in graph.relations:
        assert 0 < one.bandwidth <= min(own[one.a], own[one.b])


WORDS = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS", "SOC", "NV1", "NV2", "NV4", "NV12", "NV18", "XYZ", ""])


@settings(deadline=None)
@given(st.data())
def test_any_matrix_becomes_a_graph_that_hangs_together(data: st.DataObject) -> None:
    gpus, nics = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
    devices = tuple([f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)])
    words = {}
    for a, b in itertools.combinations(devices, 2):
        word = data.draw(WORDS)
        if "NIC" in b and bonded(word):
            word = "NODE"
        if word:
            words[a, b] = words[b, a] = word
        match data.draw(st.sampled_from(["same", "same", "same", "cut", "other"])):
            case "cut":
                words.pop((b, a), None)
            case "other":
                words[b, a] = "PHB"
    numa = {one: Affinity(numa=data.draw(st.sampled_from(["", "0", "1", "0-1", "N/A"]))) for one in devices[:gpus]}
    sound(host_graph.build_host_graph([Matrix(devices, words, numa)]), Matrix(devices, words, numa))


def test_sixteen_gpus_and_eighteen_nics_take_no_time() -> None:
    devices = [f"GPU{i}" for i in range(16)] + [f"NIC{i}" for i in range(18)]
    words = {}
    for (i, a), (j, b) in itertools.permutations(enumerate(devices), 2):
        near = "PIX" if i % 16 // 2 == j % 16 // 2 else "NODE" if i % 16 // 8 == j % 16 // 8 else "SYS"
        words[a, b] = "NV6" if i < 16 and j < 16 else near
    reading = Matrix(tuple(devices), words)
    begin = time.process_time()
    graph = host_graph.build_host_graph([reading])
    assert time.process_time() - begin < 2.0  # 0.02 s on a desktop; a shared machine is slower
    assert len(graph.links) > 561
