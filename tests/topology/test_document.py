"""Documents of `topo -o json`: what is printed can be read again, what is written by hand is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from psctl.errors import InvalidFile
from psctl.topology.facts import HostFacts
from psctl.topology.findings import Finding
from psctl.topology.graph import Between, ClusterGraph, Device, HostGraph, HostNode, Link, Suggestion
from psctl.topology.host import host_graph
from psctl.topology.host.document import cluster_document, host_document, read_cluster_document
from psctl.topology.readers.matrix import read_matrix
from psctl.topology.readers.nccl_xml import read_nccl

CAPTURED = Path(__file__).resolve().parent.parent / "captured"

FILES = [*sorted((CAPTURED / "topo-m").glob("*.txt")), *sorted((CAPTURED / "nccl-xml").glob("*.xml"))]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_is_printed_is_read_again(path: Path) -> None:
    text = path.read_text(errors="replace")
    graph = host_graph.build_host_graph([read_nccl(text) if path.suffix == ".xml" else read_matrix(text)])
    cluster = ClusterGraph((HostNode("saved", graph),))
    printed = json.loads(json.dumps(cluster_document(cluster)))
    assert read_cluster_document(printed) == cluster
    assert cluster_document(read_cluster_document(printed)) == printed
    assert read_cluster_document(printed["hosts"][0]).hosts[0].graph == graph


CLUSTER = ClusterGraph(
    (
        HostNode("a", HostGraph((Device("CPU0", "cpu", 0, cores=8), Device("eth0", "nic", addresses=("10.0.0.5/24",),
                 bandwidth=1e9, interface="eth0")), (Link("eth0", "CPU0", "PCIe", 16e9, 3e-7),),
                 (Finding("a fan is broken", "mend it"),)), {"rack": "r1"}),
        HostNode("b", HostGraph((Device("CPU0", "cpu"),)), roles=("server",)),
    ),
    (Between("a", "network", 62.5e6, 1e-4, True, "eth0"), Between("b", "network")),
)  # fmt: skip


def test_a_cluster_with_all_that_there_is() -> None:
    suggestion = Suggestion("ring", "it is the only one", (("a/GPU0", "b/GPU0"),), (1.0,))
    printed = json.loads(json.dumps(cluster_document(CLUSTER, suggestion, failed=[{"name": "c", "error": {}}])))
    assert printed["hosts"][0]["devices"][1] == {
        "id": "eth0", "kind": "nic", "numa": None, "interface": "eth0", "addresses": ["10.0.0.5/24"], "bandwidth": 1e9,
    }  # fmt: skip
    assert printed["hosts"][0]["links"] == [
        {"a": "eth0", "b": "CPU0", "type": "PCIe", "bandwidth": 16e9, "measured": False, "latency": 3e-7}
    ]
    assert printed["hosts"][0]["problems"] == [{"what": "a fan is broken", "cure": "mend it"}]
    assert printed["hosts"][1]["roles"] == ["server"]
    assert printed["hosts"][2] == {"name": "c", "devices": [], "links": [], "error": {}}
    assert printed["between"][1]["bandwidth"] is None
    assert printed["strategy"] == {
        "name": "ring", "reason": "it is the only one", "groups": [["a/GPU0", "b/GPU0"]], "shares": [1.0],
        "trees": [],
    }  # fmt: skip
    del printed["hosts"][2]
    assert read_cluster_document(printed) == CLUSTER


def test_every_promised_key_is_there() -> None:
    facts = HostFacts("x86_64", 8, "", (), 1 << 34, (), (), (), None, "", "")
    body = host_document("node", host_graph.build_host_graph([], facts), facts, {"rack": "r1"})
    assert {key: body[key] for key in ("name", "cores", "memory", "labels", "problems")} == {
        "name": "node", "cores": 8, "memory": 1 << 34, "labels": {"rack": "r1"}, "problems": [],
    }  # fmt: skip
    assert set(cluster_document(ClusterGraph(()))) == {"hosts", "between", "strategy"}
    bridge = HostGraph(
        (Device("GPU0", "gpu"), Device("GPU1", "gpu")), (Link("GPU0", "GPU1", "NV4", 1e11, None, False),)
    )
    assert host_document("node", bridge)["links"] == [
        {"a": "GPU0", "b": "GPU1", "type": "NV4", "bandwidth": 1e11, "measured": False, "switched": False}
    ]


def test_the_error_of_a_host_that_failed_becomes_a_finding() -> None:
    row = {"name": "c", "devices": [], "links": [], "error": {"message": "no route", "hint": "look at the cable"}}
    (host,) = read_cluster_document({"hosts": [row]}).hosts
    assert host.graph.findings == (Finding("no route", "look at the cable"),)


def small() -> dict[str, Any]:
    """One host by hand, with the promised keys alone."""
    devices = [{"id": "GPU0", "kind": "gpu"}, {"id": "GPU1", "kind": "gpu"}, {"id": "SW0", "kind": "switch"}]
    edges = [{"a": f"GPU{i}", "b": "SW0", "type": "PCIe", "bandwidth": 16e9} for i in range(2)]
    return {"devices": devices, "links": [*edges, {"a": "GPU0", "b": "GPU1", "type": "PIX"}]}


def test_one_host_by_hand() -> None:
    (host,) = read_cluster_document(small()).hosts
    assert (host.name, host.roles, host.labels) == ("host", ("worker", "server"), {})
    assert host.graph.devices[0] == Device("GPU0", "gpu")
    assert host.graph.links[0] == Link("GPU0", "SW0", "PCIe", 16e9)
    assert host.graph.links[2] == Link("GPU0", "GPU1", "PIX", 16e9)  # what the pair gets: by its widest way


def test_nvn_by_hand_without_switched_follows_the_rule() -> None:
    gpus = [{"id": f"GPU{i}", "kind": "gpu"} for i in range(4)]
    pairs = [{"a": f"GPU{i}", "b": f"GPU{j}", "bandwidth": 3e11} for i in range(4) for j in range(i)]
    body: dict[str, Any] = {"devices": gpus, "links": [{**pair, "type": "NV12"} for pair in pairs]}
    assert {link.switched for link in read_cluster_document(body).hosts[0].graph.links} == {True}
    body["links"] = [{**pair, "type": "NV2"} for pair in pairs]
    assert {link.switched for link in read_cluster_document(body).hosts[0].graph.links} == {False}


def test_more_keys_are_passed_over() -> None:
    body = {**small(), "colour": "red"}
    body["devices"][0]["serial"] = 7
    assert read_cluster_document(body) == read_cluster_document(small())


def put(where: str, value: object) -> dict[str, Any]:
    """The small host as a cluster of two, one value changed; `...` takes the key away."""
    document: dict[str, Any] = {
        "hosts": [{"name": "a", **small()}, {"name": "b", **small()}],
        "between": [{"a": "a", "b": "b", "bandwidth": 1e9}],
    }
    at: Any = document
    *path, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
    for key in path:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return document


@pytest.mark.parametrize(
    ("where", "value", "path"),
    [
        ("hosts.0.links.1.bandwidth", ..., "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", 0, "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", None, "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", -1, "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", "16 GB/s", "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", True, "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", float("inf"), "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.bandwidth", float("nan"), "hosts[0].links[1].bandwidth"),
        ("hosts.0.links.1.latency", -1e-6, "hosts[0].links[1].latency"),
        ("hosts.0.links.1.a", "GPU9", "hosts[0].links[1].a"),
        ("hosts.0.links.1.b", "GPU1", "hosts[0].links[1].b"),
        ("hosts.0.links.1.type", ..., "hosts[0].links[1].type"),
        ("hosts.0.links.1.switched", True, "hosts[0].links[1].switched"),
        ("hosts.0.links.2.type", "NV4", "hosts[0].links[2].bandwidth"),
        ("hosts.0.links.1", {"a": "GPU1", "b": "GPU0", "type": "SYS"}, "hosts[0].links[2]"),
        ("hosts.0.links.1", "GPU1-SW0", "hosts[0].links[1]"),
        ("hosts.0.links", ..., "hosts[0].links"),
        ("hosts.0.links", {}, "hosts[0].links"),
        ("hosts.0.devices", ..., "hosts[0].devices"),
        ("hosts.1.devices.0.kind", "tpu", "hosts[1].devices[0].kind"),
        ("hosts.1.devices.0.kind", ..., "hosts[1].devices[0].kind"),
        ("hosts.1.devices.0.id", "", "hosts[1].devices[0].id"),
        ("hosts.1.devices.0.id", "GPU1", "hosts[1].devices[1].id"),
        ("hosts.1.devices.0.numa", "0", "hosts[1].devices[0].numa"),
        ("hosts.1.devices.0.numa", -1, "hosts[1].devices[0].numa"),
        ("hosts.1.name", "a", "hosts[1].name"),
        ("hosts.1.roles", ["cook"], "hosts[1].roles[0]"),
        ("hosts", [], "hosts"),
        ("hosts", {"a": 1}, "hosts"),
        ("hosts.0.links.1.measured", "yes", "hosts[0].links[1].measured"),
        ("between.0.bandwidth", ..., "between[0].bandwidth"),
        ("between.0.measured", 1, "between[0].measured"),
        ("between.0.b", "a", "between[0].b"),
        ("between.0.via", "eth7", "between[0].via"),
        ("between", [1], "between[0]"),
    ],
)
def test_a_mistake_is_named_by_its_path(where: str, value: object, path: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        read_cluster_document(put(where, value))
    assert caught.value.where == path
    assert path in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("document", [None, 3, [], "GPU0", {}, {"jobs": []}])
def test_what_is_no_topology_is_refused(document: object) -> None:
    with pytest.raises(InvalidFile):
        read_cluster_document(document)


def test_the_small_document_itself_is_right() -> None:
    cluster = read_cluster_document(put("between.0.measured", True))
    assert cluster.between == (Between("a", "b", 1e9, measured=True),)
    assert msgspec.structs.replace(cluster.hosts[1], name="a") == cluster.hosts[0]
