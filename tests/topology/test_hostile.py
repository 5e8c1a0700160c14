"""Outputs that no machine prints: they end in a finding soon, and nothing is concluded of what was not told."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from psctl.errors import InvalidFile
from psctl.topology.graph import HostGraph
from psctl.topology.host.document import read_cluster_document
from psctl.topology.host.host_graph import build_host_graph
from psctl.topology.readers import recognise

CAPTURED = Path(__file__).resolve().parent.parent / "captured"

SLOT = '<pci busid="{:04x}:{:02x}:00.0" class="0x030200"><gpu dev="{}" sm="80"/></pci>'


def graph_of(text: str) -> HostGraph:
    """Return what a text becomes; it must not take the time that its square would."""
    begin = time.process_time()
    graph = build_host_graph(recognise.read_all(text))
    assert time.process_time() - begin < 10
    return graph


def square(count: int) -> str:
    """A random matrix of so many GPUs."""
    words = random.Random(1)
    pairs: dict[tuple[int, int], str] = {}
    for a in range(count):
        for b in range(a):
            pairs[a, b] = pairs[b, a] = words.choice(["NV1", "NV2", "SYS", "PIX", "PXB", "PHB", "NODE"])
    rows = ["\t".join([f"GPU{a}", *("X" if a == b else pairs[a, b] for b in range(count))]) for a in range(count)]
    return "\n".join(["\t" + "\t".join(f"GPU{a}" for a in range(count)), *rows, ""])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('<system version="1">' + '<cpu numaid="0">' * 100_000, "levels of elements"),
        ('<system version="1"><cpu numaid="0">' + "".join(SLOT.format(i // 256, i % 256, i) for i in range(2000))
         + "</cpu></system>", "2,000 GPUs"),
        ("".join(f"GPU {i}: NVIDIA A100 (UUID: GPU-{i:08x})\n\t Link 0: 25 GB/s\n" for i in range(2000)), "2,000 GPUs"),
        ("index, name, pci.bus_id\n" + "".join(f"{i}, NVIDIA A100, 00000000:{i % 256:02X}:00.0\n" for i in range(2000)),
         "2,000 GPUs"),
        (square(256), "256 GPUs"),
        (square(600), "600 rows or columns"),
        ("\tGPU0\tGPU1\tCPU Affinity\n" * 60_000, "60,001 lines"),
        ('<system version="1"></system>\n' * 10_000, "more than 64 outputs"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n" * 10_000, "more than 64 outputs"),
    ],
    ids=["deep XML", "GPUs in XML", "GPUs of nvlink", "GPUs of a query", "large matrix", "larger matrix", "headers",
         "XML documents", "matrices"],
)  # fmt: skip
def test_what_no_host_prints_ends_in_a_finding(text: str, what: str) -> None:
    assert any(what in finding.what for finding in graph_of(text).findings)


def host(gpus: int, links: int = 0) -> dict[str, object]:
    devices = [{"id": f"GPU{i}", "kind": "gpu"} for i in range(gpus)]
    return {"name": "h", "devices": devices, "links": [{"a": "GPU0", "b": "GPU1", "type": "SYS"}] * links}


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ({"hosts": [host(2000)]}, "2,000 GPUs of one host"),
        (host(2, 100_000), "100,000 links"),
        ({"hosts": [{**host(1), "name": f"h{i}"} for i in range(5000)]}, "5,000 hosts"),
        ({"hosts": [host(1)], "between": [{"a": "h", "b": "n", "bandwidth": 1}] * 40_000}, "40,000 links"),
    ],
    ids=["GPUs", "links", "hosts", "between"],
)
def test_a_document_of_an_impossible_machine_is_refused(document: dict[str, object], what: str) -> None:
    with pytest.raises(InvalidFile, match=what):
        read_cluster_document(document)


def test_nvlink_counts_alone_draw_no_link() -> None:
    text = (CAPTURED / "nvlink-s" / "a6000x8-4links.txt").read_text()
    graph = build_host_graph(recognise.read_all(text))
    assert len(graph.devices) == 8 and {device.kind for device in graph.devices} == {"gpu"}
    assert graph.links == ()
    assert any("where they lead" in finding.what and "topo -m" in finding.cure for finding in graph.findings)


def test_nics_are_read_where_their_columns_are_lost() -> None:
    whole = (CAPTURED / "topo-m" / "dgx1v-v100x8-mlx5x4-tabs.txt").read_text()
    cut = "\n".join("\t".join(line.split("\t")[:9]) if line.count("\t") > 8 else line for line in whole.split("\n"))
    graph = build_host_graph(recognise.read_all(cut))
    assert [device.id for device in graph.devices if device.kind == "nic"] == ["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"]
    assert any("no column for mlx5_0" in finding.what for finding in graph.findings)
    near = {link.a for link in graph.links if link.b == "SW0"}
    assert near == {"GPU0", "GPU1", "mlx5_0"}, "as the whole matrix says"
