"""Documents of `topo -o json` for machines that drawings are tried on: written out here, read by no parser."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]

MESH = """
01:1 02:1 03:2 04:2 12:2 13:1 15:2 23:2 26:1 37:1 45:1 46:1 47:2 56:2 57:1 67:2
"""
"""The NVLinks of an 8-GPU hybrid cube mesh: both ends and how many."""


def device(id: str, kind: str, numa: int | None = None, **more: Any) -> Document:
    return {"id": id, "kind": kind, "numa": numa, **more}


def link(a: str, b: str, type: str, bandwidth: float = 0.0, **more: Any) -> Document:
    return {"a": a, "b": b, "type": type, "bandwidth": bandwidth, "measured": False, **more}


def slot(a: str, b: str, bandwidth: float = 16e9, **more: Any) -> Document:
    return link(a, b, "PCIe", bandwidth, **more)


def processors(count: int) -> list[Document]:
    return [device(f"CPU{i}", "cpu", i, name="AMD EPYC 7742 64-Core Processor", cores=64) for i in range(count)]


def alone(host: Document, strategy: Document | None = None) -> Document:
    return {"hosts": [host], "between": [], "strategy": strategy}


def cube_mesh(name: str = "dgx", findings: bool = True) -> Document:
    """8 GPUs in a hybrid cube mesh, a switch for each two with a NIC, two processors."""
    devices = [device(f"GPU{i}", "gpu", i // 4, name="Tesla V100-SXM2-16GB", memory=17071734784) for i in range(8)]
    devices += [device(f"mlx5_{i}", "nic", i // 2, bandwidth=11.95e9, interface=f"ib{i}") for i in range(4)]
    devices += processors(2)
    devices += [device(f"SW{i}", "switch", i // 2, name="PCIe switch", derived=True) for i in range(4)]
    links = [slot(f"GPU{i}", f"SW{i // 2}", derived=True) for i in range(8)]
    links += [slot(f"mlx5_{i}", f"SW{i}", derived=True) for i in range(4)]
    links += [slot(f"SW{i}", f"CPU{i // 2}", derived=True) for i in range(4)]
    links += [link("CPU0", "CPU1", "SMP", 19.2e9, derived=True)]
    for a in range(8):
        for b in range(a + 1, 8):
            links.append(link(f"GPU{a}", f"GPU{b}", "SYS", 9.6e9))
    for word in MESH.split():
        a, b, count = int(word[0]), int(word[1]), int(word[3])
        links = [x for x in links if {x["a"], x["b"]} != {f"GPU{a}", f"GPU{b}"}]
        links.append(link(f"GPU{a}", f"GPU{b}", f"NV{count}", 25e9 * count, switched=False))
    links += [link(f"GPU{i}", f"mlx5_{j}", "PIX" if i // 2 == j else "SYS") for i in range(8) for j in range(4)]
    problems = [
        {
            "what": "GPU3 runs at PCIe x4 of x16: a quarter of its bandwidth",
            "cure": "reseat the card; look at the riser",
        },
        {"what": "mlx5_2 is at 25 Gbit/s, the others at 100", "cure": "look at its cable and its switch port"},
    ]
    about: Document = {"name": name, "cores": 128, "memory": 540e9, "labels": {"rack": "r1"}}
    return {**about, "devices": devices, "links": links, "problems": problems if findings else []}


TWO_RINGS: Document = {
    "name": "multi-ring",
    "reason": "2 link-disjoint rings use all 24 NVLinks once: 150 GB/s out of every GPU",
    "groups": [
        ["GPU0", "GPU3", "GPU2", "GPU1", "GPU5", "GPU6", "GPU7", "GPU4"],
        ["GPU0", "GPU1", "GPU3", "GPU7", "GPU5", "GPU4", "GPU6", "GPU2"],
    ],
    "shares": [2 / 3, 1 / 3],
}


def switched(gpus: int, nics: int, name: str = "hgx") -> Document:
    """GPUs on an NVSwitch, two to a PCIe switch, NICs spread over the switches."""
    switches = gpus // 2
    numa = lambda i, n: 2 * i // n  # noqa: E731 - the first half at node 0
    devices = [
        device(
            f"GPU{i}", "gpu", numa(i, gpus), name="NVIDIA A100-SXM4-80GB", memory=85899345920, bus=f"0000:{i:02x}:00.0"
        )
        for i in range(gpus)
    ]
    devices += [device(f"NIC{i}", "nic", numa(i, nics), name=f"mlx5_{i}", bandwidth=23.9e9) for i in range(nics)]
    devices += processors(2)
    devices += [
        device(f"SW{i}", "switch", numa(i, switches), name="PCIe switch", derived=True) for i in range(switches)
    ]
    devices += [device("NVSW0", "switch", None, name="NVSwitch", derived=True)]
    links = [slot(f"GPU{i}", f"SW{i // 2}", 31.5e9, derived=True) for i in range(gpus)]
    links += [slot(f"NIC{i}", f"SW{i * switches // nics}", 31.5e9, derived=True) for i in range(nics)]
    links += [slot(f"SW{i}", f"CPU{numa(i, switches)}", 31.5e9, derived=True) for i in range(switches)]
    links += [link("CPU0", "CPU1", "SMP", 64e9, derived=True)]
    links += [link(f"GPU{i}", "NVSW0", "NVLink", 300e9, derived=True) for i in range(gpus)]
    for a in range(gpus):
        links += [link(f"GPU{a}", f"GPU{b}", "NV12", 300e9, switched=True) for b in range(a + 1, gpus)]
        links += [link(f"GPU{a}", f"NIC{b}", "SYS") for b in range(nics)]
    return {
        "name": name,
        "cores": 128,
        "memory": 2e12,
        "labels": {},
        "devices": devices,
        "links": links,
        "problems": [],
    }


def one_switch() -> Document:
    """4 GPUs behind one PCIe switch."""
    devices = [device(f"GPU{i}", "gpu", 0) for i in range(4)] + processors(1)
    devices += [device("SW0", "switch", 0, name="PCIe switch", derived=True)]
    links = [slot(f"GPU{i}", "SW0", derived=True) for i in range(4)] + [slot("SW0", "CPU0", derived=True)]
    links += [link(f"GPU{a}", f"GPU{b}", "PIX", 16e9) for a in range(4) for b in range(a + 1, 4)]
    return {"name": "saved", "devices": devices, "links": links, "problems": []}


def accelerated() -> Document:
    """4 accelerators each of which is joined to every other, as an MI300A is; no switch, a processor each."""
    devices = [device(f"GPU{i}", "gpu", i) for i in range(4)] + [
        device(f"CPU{i}", "cpu", i, derived=True) for i in range(4)
    ]
    links = [slot(f"GPU{i}", f"CPU{i}", derived=True) for i in range(4)]
    links += [link(f"GPU{a}", f"GPU{b}", "xGMI", 64e9) for a in range(4) for b in range(a + 1, 4)]
    links += [link(f"CPU{a}", f"CPU{b}", "SMP", 19.2e9, derived=True) for a in range(4) for b in range(a + 1, 4)]
    return {"name": "saved", "devices": devices, "links": links, "problems": []}


def far_apart() -> Document:
    """8 GPUs and 2 NICs of which each sits in a slot of its own, on 8 NUMA nodes."""
    devices = [device(f"GPU{i}", "gpu", i, name="NVIDIA GeForce RTX 4090", memory=25757220864) for i in range(8)]
    devices += [device(f"NIC{i}", "nic", i, name=f"mlx5_{i}") for i in range(2)] + processors(8)
    links = [slot(f"GPU{i}", f"CPU{i}") for i in range(8)] + [slot(f"NIC{i}", f"CPU{i}") for i in range(2)]
    links += [link(f"CPU{a}", f"CPU{b}", "SMP", 19.2e9, derived=True) for a in range(8) for b in range(a + 1, 8)]
    links += [link(f"GPU{a}", f"GPU{b}", "SYS", 9.6e9) for a in range(8) for b in range(a + 1, 8)]
    return {"name": "saved", "devices": devices, "links": links, "problems": []}


def plain(name: str, rack: str = "") -> Document:
    """A host without GPUs."""
    devices = [device("CPU0", "cpu", 0, name="Intel Xeon Processor", cores=2), device("CPU1", "cpu", 1, cores=2)]
    devices += [device("eth0", "nic", 0, name="virtio_net", addresses=["10.0.0.5/24"], bandwidth=119.5e6)]
    devices += [device("eth1", "nic", None, name="veth", addresses=["192.168.7.5/24"])]
    labels = {"rack": rack} if rack else {}
    return {
        "name": name,
        "cores": 4,
        "memory": 8 * 2**30,
        "labels": labels,
        "devices": devices,
        "links": [],
        "problems": [],
    }


def uplink(a: str, b: str, bandwidth: float | None, measured: bool = False, **more: Any) -> Document:
    return {"a": a, "b": b, "bandwidth": bandwidth, "latency": 1e-4, "measured": measured, "type": "Ethernet", **more}


def three_hosts() -> Document:
    """3 hosts on one network, their rates measured; a fourth did not answer."""
    rates = {"node-a": 11.7e6, "node-b": 23.4e6, "node-c": 58.5e6}
    error = {"code": "host-unreachable", "exit": 3, "message": "node-d: refused", "hint": "is sshd there?", "where": ""}
    dead = {"name": "node-d", "devices": [], "links": [], "error": {"error": error}}
    between = [uplink(name, "network", rate, True, via="eth0") for name, rate in rates.items()]
    strategy = {"name": "ps", "reason": "links differ: node-c carries most", "groups": []}
    return {"hosts": [*map(plain, rates), dead], "between": between, "strategy": strategy}


def racks(count: int = 16, gpus: bool = False) -> Document:
    """Hosts in two racks, whose switches share a trunk."""
    names = [f"node{i:02d}" for i in range(1, count + 1)]
    rack = {name: f"r{1 + (2 * i >= count)}" for i, name in enumerate(names)}
    hosts = [cube_mesh(name, findings=False) if gpus else plain(name, rack[name]) for name in names]
    between = [uplink(name, rack[name], 1.195e9, via="eth0") for name in names] + [uplink("r1", "r2", 4.78e9, True)]
    strategy = {
        "name": "hierarchical",
        "reason": "racks share a trunk",
        "groups": [names[: count // 2], names[count // 2 :]],
    }
    return {"hosts": hosts, "between": between, "strategy": strategy}


HOSTILE = "\x1b[31m</svg><script>\"'&{}|<>\\\u202eevil\x00\n--"
"""A name that would break a terminal, an XML text, and a dot text."""


def hostile() -> Document:
    """A machine each of whose texts is out for harm."""
    devices = [
        device(f"GPU0{HOSTILE}", "gpu", 0, name=HOSTILE, bus=HOSTILE),
        device(f"CPU0{HOSTILE}", "cpu", 0, name=HOSTILE),
    ]
    devices += [device(f"NIC0{HOSTILE}", "nic", 0, name=HOSTILE, addresses=[HOSTILE], interface=HOSTILE)]
    links = [slot(f"GPU0{HOSTILE}", f"CPU0{HOSTILE}"), link(f"GPU0{HOSTILE}", f"NIC0{HOSTILE}", HOSTILE, 1e9)]
    labels = {HOSTILE: HOSTILE}
    host = {"name": f"h{HOSTILE}", "devices": devices, "links": links, "labels": labels}
    host["problems"] = [{"what": f"GPU0 {HOSTILE}", "cure": HOSTILE}]
    strategy = {"name": "ring", "reason": HOSTILE, "groups": [[f"GPU0{HOSTILE}", HOSTILE, "x"]], "shares": [1.0]}
    return {"hosts": [host], "between": [uplink(f"h{HOSTILE}", HOSTILE, 1e9, via=HOSTILE)], "strategy": strategy}
