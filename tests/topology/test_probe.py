"""The probe runs on a bare shell; its answer becomes facts, whatever tools the host lacks and whatever is broken."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.facts import HostFacts
from psctl.topology.readers.probe import PROBE, parse_probe
from psctl.topology.readings import (
    FailedOutput,
    GpuTable,
    Matrix,
    NvlinkStatus,
    PciTree,
    PeerMatrix,
    RdmaPort,
    RdmaPorts,
    RocmTopology,
)

CAPTURED = Path(__file__).parent.parent / "captured" / "errors"

NETDEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 23178264   17631    0    0    0     0          0         0 23178264   17631    0    0    0     0       0
  eth0: 71736703    2110    0    0    0     0          0         0   146216    1254    0    0    0     0       0
 ens1f0: 71736703    2110    0    0    0     0          0         0   146216    1254    0    0    0     0       0
docker0: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
"""
IPADDR = """\
1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
2: eth0    inet 10.0.0.5/24 brd 10.0.0.255 scope global dynamic eth0\\       valid_lft 84000sec
2: eth0    inet6 2001:db8::5/64 scope global \\       valid_lft forever preferred_lft forever
2: eth0    inet6 fe80::42:acff:fe11:2/64 scope link \\       valid_lft forever preferred_lft forever
3: ens1f0    inet 192.168.9.5/16 scope global ens1f0\\       valid_lft forever
4: docker0    inet 172.17.0.1/16 brd 172.17.255.255 scope global docker0\\       valid_lft forever
"""
ROUTE = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
ens1f0\t00000000\t0100A8C0\t0003\t0\t0\t900\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
ens1f0\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
FIB = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 10.0.0.0/24 2 0 2
        |-- 10.0.0.0
           /24 link UNICAST
        |-- 10.0.0.5
           /32 host LOCAL
        |-- 10.0.0.255
           /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 172.17.0.1
        /32 host LOCAL
     |-- 192.168.9.5
        /32 host LOCAL
Local:
        |-- 10.0.0.5
           /32 host LOCAL
"""
INET6 = """\
20010db8000000000000000000000005 02 40 00 80     eth0
fe8000000000000000000000000000aa 02 40 20 80     eth0
00000000000000000000000000000001 01 80 10 80       lo
"""
SYSNET = (
    "docker0\tdown\t1500\t-1\t\tbridge\t\n"
    "ens1f0\tup\t9000\t25000\tmlx5_core\tphysical\t1\n"
    "eth0\tup\t1500\t1000\tigb\tphysical\t0\n"
    "lo\tunknown\t65536\t\t\tvirtual\t\n"
)
ADDRESSES = {
    "lo": ("127.0.0.1/8", "::1/128"), "eth0": ("10.0.0.5/24", "2001:db8::5/64"), "ens1f0": ("192.168.9.5/16",),
    "docker0": ("172.17.0.1/16",),
}  # fmt: skip


def answer(**parts: str | tuple[str, int]) -> str:
    """Return what PROBE would print: sections by name, each text or (text, status)."""
    rows = [(name, *(part if isinstance(part, tuple) else (part, 0))) for name, part in parts.items()]
    return "".join(f"\n== psctl {name}\n{text}\n== status {status}\n" for name, text, status in rows)


def slot(address: str, vendor: str, numa: int, kind: str = "0x030200") -> str:
    """Return a row of the section pci."""
    folder = f"/sys/devices/pci0000:00/0000:00:01.0/{address}"
    return f"{address}\t{kind}\t{vendor}\t0x2330\t{numa}\t8.0 GT/s PCIe\t32.0 GT/s PCIe\t4\t16\t{folder}\n"


def test_the_probe_answers_about_this_machine() -> None:
    done = subprocess.run(["sh"], input=PROBE, capture_output=True, text=True, check=True, timeout=60)
    facts = parse_probe(done.stdout)
    assert done.stderr == ""
    assert facts.machine == os.uname().machine
    assert facts.cores == len(os.sched_getaffinity(0))
    assert facts.memory > 1 << 28
    assert facts.time is not None
    assert [nic.name for nic in facts.nics if nic.kind == "loopback"] == ["lo"]
    assert any(address.startswith("127.0.0.1") for nic in facts.nics for address in nic.addresses)


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_the_probe_runs_as_one_argument_with_an_empty_environment_and_next_to_no_tools(
    shell: str, tmp_path: Path
) -> None:
    found = subprocess.run(["sh", "-c", f"command -v {shell}"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"no {shell} here")
    script = f'PATH="{tmp_path}"; export PATH' + PROBE.split("export PATH", 1)[1]
    (tmp_path / "cat").symlink_to("/bin/cat")
    done = subprocess.run(
        [found.stdout.strip(), "-c", script], capture_output=True, text=True, check=True, timeout=60, env={}
    )
    facts = parse_probe(done.stdout)
    assert facts.memory > 0
    assert [nic.name for nic in facts.nics if nic.kind == "loopback"] == ["lo"]
    assert any(nic.name == "lo" and "127.0.0.1/8" in nic.addresses for nic in facts.nics), "from /proc/net/fib_trie"


SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "ash"]]

SMI = """#!/bin/sh
case "$*" in
  *mig.mode*)
    [ -z "$OLD" ] || { echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2; }
    cat "$0.query" ;;
  --query*) cat "$0.short" ;;
  "topo -m") cat "$0.topo" ;;
  "topo -p2p r")
    [ -z "$OLD" ] || { echo "ERROR: Option -p2p is not recognized."; exit 2; }
    cat "$0.peers" ;;
  "nvlink -s") cat "$0.nvlink" ;;
  *) exit 9 ;;
esac
"""
ANSWERS = {
    "query": (
        "index, name, uuid, memory.total [MiB], driver_version, pci.bus_id, pcie.link.gen.current, pcie.link.gen.max, "
        "pcie.link.width.current, pcie.link.width.max, mig.mode.current, persistence_mode\n"
        "0, NVIDIA A100, GPU-0, 81920 MiB, 550.54.15, 00000000:07:00.0, 4, 4, 8, 16, Disabled, Enabled\n"
        "1, NVIDIA A100, GPU-1, 81920 MiB, 550.54.15, 00000000:0F:00.0, 4, 4, 16, 16, Disabled, Enabled\n"
    ),
    "short": (
        "index, name, memory.total [MiB], driver_version, pci.bus_id\n"
        "0, Tesla K80, 11441 MiB, 384.81, 00000000:07:00.0\n1, Tesla K80, 11441 MiB, 384.81, 00000000:0F:00.0\n"
    ),
    "topo": "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\t0-31\nGPU1\tNV12\t X \t32-63\n",
    "peers": " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n",
    "nvlink": "GPU 0: A100 (UUID: GPU-0)\n\t Link 0: 25 GB/s\nGPU 1: A100 (UUID: GPU-1)\n\t Link 0: <inactive>\n",
}


def program(folder: Path, name: str, text: str, **answers: str) -> None:
    """Put a program that plays recorded answers into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    for answer_, said in answers.items():
        (folder / f"{name}.{answer_}").write_text(said)


def ask(folder: Path, shell: list[str], probe: str = PROBE, **env: str) -> HostFacts:
    """Run the true text of the probe where a folder's programs come first."""
    if subprocess.run(["sh", "-c", f"command -v {shell[0]}"], capture_output=True, check=False).returncode:
        pytest.skip(f"no {shell[0]} here")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **env}
    done = subprocess.run([*shell, "-c", probe], capture_output=True, text=True, check=True, timeout=60, env=env)
    assert done.stderr == ""
    return parse_probe(done.stdout)


def of(facts: HostFacts, kind: type) -> list[object]:
    """Return the readings of a kind."""
    return [one for one in facts.readings if type(one) is kind]


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_every_tool_of_nvidia_is_run_and_read(shell: list[str], tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", SMI, **ANSWERS)
    facts = ask(tmp_path, shell)
    (table,), (matrix,), (peers,), (links,) = (of(facts, kind) for kind in (GpuTable, Matrix, PeerMatrix, NvlinkStatus))
    assert isinstance(table, GpuTable) and isinstance(matrix, Matrix)
    assert isinstance(peers, PeerMatrix) and isinstance(links, NvlinkStatus)
    assert [(gpu.width, gpu.width_max) for gpu in table.gpus] == [(8, 16), (16, 16)]
    assert matrix.words["GPU0", "GPU1"] == "NV12"
    assert peers.words["GPU1", "GPU0"] == "OK"
    assert [gpu.links for gpu in links.gpus] == [(25e9,), (None,)]
    assert [(gpu.index, gpu.bus, gpu.memory) for gpu in facts.gpus] == [
        (0, "0000:07:00.0", 81920 << 20), (1, "0000:0f:00.0", 81920 << 20),
    ]  # fmt: skip
    assert facts.findings == ()


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_an_old_driver_gets_fewer_queries_and_does_not_count_as_broken(shell: list[str], tmp_path: Path) -> None:
    program(tmp_path, "nvidia-smi", SMI, **ANSWERS)
    facts = ask(tmp_path, shell, OLD="1")
    assert [gpu.name for gpu in facts.gpus] == ["Tesla K80", "Tesla K80"]
    assert len(of(facts, Matrix)) == len(of(facts, FailedOutput)) == 1
    assert facts.findings == ()


def test_the_tools_run_at_the_same_time(tmp_path: Path) -> None:
    waiting = SMI.replace('"topo -m")', '"topo -m") echo go >"$0.pipe";')
    waiting = waiting.replace('"nvlink -s")', '"nvlink -s") read go <"$0.pipe";')
    program(tmp_path, "nvidia-smi", waiting, **ANSWERS)
    os.mkfifo(tmp_path / "nvidia-smi.pipe")
    facts = ask(tmp_path, ["sh"], PROBE.replace("timeout 20", "timeout 2"))
    assert facts.findings == (), "one waits until the other comes"
    assert len(of(facts, NvlinkStatus)) == len(of(facts, Matrix)) == 1


def test_a_tool_that_hangs_is_a_finding_and_the_others_answer(tmp_path: Path) -> None:
    hanging = SMI.replace('"topo -m")', '"topo -m") read go <"$0.pipe";')
    program(tmp_path, "nvidia-smi", hanging, **ANSWERS)
    os.mkfifo(tmp_path / "nvidia-smi.pipe")
    facts = ask(tmp_path, ["sh"], PROBE.replace("timeout 20", "timeout 1"))
    assert [finding.what for finding in facts.findings] == ["nvidia-smi topo -m did not answer within 20 s"]
    assert (len(facts.gpus), len(of(facts, NvlinkStatus)), of(facts, Matrix)) == (2, 1, [])


def test_a_broken_driver_is_reported_once_though_every_tool_does(tmp_path: Path) -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
    program(tmp_path, "nvidia-smi", '#!/bin/sh\ncat "$0.said"; exit 18\n', said=said)
    facts = ask(tmp_path, ["sh"])
    assert [finding.what for finding in facts.findings] == [said.split("\n")[0]]
    assert (facts.gpus, len(of(facts, FailedOutput))) == ((), 4)


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_the_tools_of_amd_are_run_and_read(shell: list[str], tmp_path: Path) -> None:
    tool = '#!/bin/sh\ncase "$*" in *showtopo*) cat "$0.topo" ;; *) cat "$0.cards" ;; esac\n'
    cards = "".join(f"GPU[{n}]\t\t: Card Series: \t\tMI300A\nGPU[{n}]\t\t: PCI Bus: 0000:0{n}:00.0\n" for n in range(4))
    topology = (CAPTURED.parent / "rocm" / "mi300a-x4-xgmi.txt").read_text()
    program(tmp_path, "rocm-smi", tool, topo=topology, cards=cards)
    facts = ask(tmp_path, shell)
    (found,), (table,) = of(facts, RocmTopology), of(facts, GpuTable)
    assert isinstance(found, RocmTopology) and isinstance(table, GpuTable)
    assert found.types["GPU0", "GPU3"] == "XGMI"
    assert [(gpu.name, gpu.bus) for gpu in table.gpus] == [("MI300A", f"0000:0{n}:00.0") for n in range(4)]


def machine(folder: Path) -> None:
    """Make a /sys of a GPU and a NIC behind one switch, a NIC of its own, and an RDMA port."""
    root = folder / "sys/devices/pci0000:17/0000:17:01.0"
    slots = {
        "0000:17:01.0": (root, "0x060400", "0x8086", "16"),
        "0000:18:00.0": (root / "0000:18:00.0", "0x060400", "0x1000", "16"),
        "0000:19:00.0": (root / "0000:18:00.0/0000:19:00.0", "0x030200", "0x10de", "4"),
        "0000:1a:00.0": (root / "0000:18:00.0/0000:1a:00.0", "0x020700", "0x15b3", "16"),
        "0000:02:00.0": (folder / "sys/devices/pci0000:00/0000:02:00.0", "0x020000", "0x8086", "1"),
        "0000:0b:00.0": (folder / "sys/devices/pci0000:00/0000:0b:00.0", "0x068000", "0x10de", "2"),
        "0000:00:1f.0": (folder / "sys/devices/pci0000:00/0000:00:1f.0", "0x068000", "0x8086", "1"),
        "0000:00:17.0": (folder / "sys/devices/pci0000:00/0000:00:17.0", "0x010601", "0x8086", "1"),
    }  # fmt: skip
    (folder / "sys/bus/pci/devices").mkdir(parents=True)
    for address, (path, kind, vendor, width) in slots.items():
        path.mkdir(parents=True, exist_ok=True)
        files = {
            "class": kind, "vendor": vendor, "device": "0x1234", "numa_node": "0",
            "current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe",
            "current_link_width": width, "max_link_width": "16",
        }  # fmt: skip
        for name, value in files.items():
            (path / name).write_text(value + "\n")
        (folder / "sys/bus/pci/devices" / address).symlink_to(path)
    port = folder / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, value in {"rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE", "link_layer": "InfiniBand"}.items():
        (port / name).write_text(value + "\n")
    slot = slots["0000:1a:00.0"][0]
    (slot / "net/ib0").mkdir(parents=True)
    (slot / "net/ib0/dev_port").write_text("0\n")
    (folder / "sys/class/infiniband/mlx5_0/device").symlink_to(slot)


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_slots_bridges_and_rdma_ports_come_from_sys(shell: list[str], tmp_path: Path) -> None:
    machine(tmp_path)
    facts = ask(tmp_path, shell, PROBE.replace("/sys/", f"{tmp_path}/sys/"))
    (tree,), (ports,) = of(facts, PciTree), of(facts, RdmaPorts)
    assert isinstance(tree, PciTree) and isinstance(ports, RdmaPorts)
    found = {device.address: device for device in tree.devices}
    bridges = ("0000:17:01.0", "0000:18:00.0")
    assert sorted(found) == ["0000:02:00.0", "0000:0b:00.0", *bridges, "0000:19:00.0", "0000:1a:00.0"]
    assert len(tree.devices) == len(found), "each bridge once"
    card = found["0000:19:00.0"]
    assert (card.path, card.width, card.width_max, card.speed, card.speed_max) == (bridges, 4, 16, 16.0, 32.0)
    assert (found["0000:1a:00.0"].path, found["0000:18:00.0"].path) == (bridges, bridges[:1])
    assert ports.ports == (RdmaPort("mlx5_0", 1, 50e9, True, "InfiniBand", "0000:1a:00.0", "ib0", 0),)


def test_interfaces_from_ip_and_sys() -> None:
    facts = parse_probe(answer(netdev=NETDEV, ipaddr=IPADDR, sysnet=SYSNET, route=ROUTE))
    nics = {nic.name: nic for nic in facts.nics}
    assert list(nics) == ["lo", "eth0", "ens1f0", "docker0"]
    assert nics["eth0"].addresses == ("10.0.0.5/24", "2001:db8::5/64")
    fast = nics["ens1f0"]
    assert (fast.speed, fast.driver, fast.kind, fast.numa) == (3.125e9, "mlx5_core", "physical", 1)
    assert (nics["docker0"].kind, nics["docker0"].up) == ("bridge", False)
    assert (nics["lo"].kind, nics["lo"].up, nics["lo"].speed) == ("loopback", True, None)
    assert facts.default_interface == "eth0"


def test_without_ip_the_addresses_come_from_proc() -> None:
    facts = parse_probe(answer(netdev=NETDEV, fibtrie=FIB, inet6=INET6, route=ROUTE, sysnet=SYSNET, iplink=("", 1)))
    assert {nic.name: nic.addresses for nic in facts.nics} == ADDRESSES


def test_interfaces_of_another_namespace_in_sys_are_not_this_hosts() -> None:
    netdev = "a |b\n lo: 0 0\n veth7: 0 0\n"
    links = "1: lo: <LOOPBACK,UP,LOWER_UP> mtu 65536 qdisc noqueue\n9: veth7@if8: <BROADCAST,UP,LOWER_UP> mtu 1400 q\n"
    address = "9: veth7@if8    inet 10.9.0.2/24 scope global veth7\\   valid_lft forever"
    facts = parse_probe(answer(netdev=netdev, iplink=links, ipaddr=address, sysnet=SYSNET))
    assert [(nic.name, nic.up, nic.addresses) for nic in facts.nics] == [
        ("lo", True, ()), ("veth7", True, ("10.9.0.2/24",)),
    ]  # fmt: skip


def test_an_interface_without_its_cable_is_down() -> None:
    links = "2: eth0: <NO-CARRIER,BROADCAST,MULTICAST,UP> mtu 1500 qdisc mq state DOWN\n"
    assert not parse_probe(answer(netdev="h|h\n eth0: 0\n", iplink=links)).nics[0].up


def test_processor_and_memory() -> None:
    facts = parse_probe(
        answer(
            uname="node-a\n6.8.0\nx86_64",
            cores="32",
            lscpu="Architecture:  x86_64\nModel name:          AMD EPYC 7282  16-Core Processor\n",
            numa="0\t0-7,16-23\n1\t8-15,24-31\n2\t\n",
            memory="MemTotal:       264000000 kB\nMemAvailable:   250000000 kB\n",
            memorylimit="17179869184\nmax\n",
            time="1795175807.868447896",
            connection="192.0.2.9 50022 10.0.0.5 22",
            boot="2f8f7e6c-0000-4000-8000-000000000001",
        )
    )
    assert (facts.machine, facts.cores) == ("x86_64", 32)
    assert facts.cpu == "AMD EPYC 7282 16-Core Processor"
    assert [(node.index, node.cores) for node in facts.numa] == [(0, 16), (1, 16)]
    assert facts.memory == 17_179_869_184, "the container's limit"
    assert (facts.time, facts.connected) == (1795175807.868447896, "10.0.0.5")


def test_busybox_has_no_nanoseconds_and_no_model_name() -> None:
    facts = parse_probe(answer(time="1795175807.N", cpuinfo="Model\t\t: Raspberry Pi 5 Model B", cores="4"))
    assert (facts.time, facts.cpu) == (1795175807.0, "Raspberry Pi 5 Model B")


H200 = (
    "0, NVIDIA H200, 143771 MiB, 570.86.15, 00000000:0F:00.0\n1, NVIDIA H200, 143771 MiB, 570.86.15, 00000000:1F:00.0"
)


def test_gpus_with_their_numa_nodes() -> None:
    pci = slot("0000:0f:00.0", "0x10de", 0) + slot("0000:1f:00.0", "0x10de", 1) + slot("0000:02:00.0", "0x1a03", -1)
    facts = parse_probe(answer(nvidia=H200, pci=pci))
    assert [(gpu.index, gpu.name, gpu.memory, gpu.driver, gpu.bus, gpu.numa) for gpu in facts.gpus] == [
        (0, "NVIDIA H200", 143_771 << 20, "570.86.15", "0000:0f:00.0", 0),
        (1, "NVIDIA H200", 143_771 << 20, "570.86.15", "0000:1f:00.0", 1),
    ]
    assert facts.findings == ()


@pytest.mark.parametrize(
    ("name", "what", "cure"),
    [
        ("version-mismatch-with-nvml-line", "Failed to initialize NVML: Driver/library version mismatch", "reboot"),
        ("gpu-access-blocked-wsl", "Failed to initialize NVML: GPU access blocked by the operating system", "WSL"),
        ("handle-unknown-error-gpu1", "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error",
         "fell off the bus"),
    ],
)  # fmt: skip
def test_a_broken_driver_is_one_finding_with_its_cure(name: str, what: str, cure: str) -> None:
    facts = parse_probe(answer(nvidia=((CAPTURED / f"{name}.txt").read_text(), 255)))
    assert [finding.what for finding in facts.findings] == [what]
    assert cure in facts.findings[0].cure
    assert facts.gpus == ()


def test_two_troubles_are_two_findings() -> None:
    facts = parse_probe(answer(nvidia=((CAPTURED / "handle-unknown-error-then-no-devices.txt").read_text(), 6)))
    assert [finding.what for finding in facts.findings] == [
        "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error", "No devices were found",
    ]  # fmt: skip


def test_the_other_gpus_of_a_broken_host_are_still_seen() -> None:
    broken = (CAPTURED / "handle-unknown-error-gpu1.txt").read_text()
    facts = parse_probe(answer(nvidia=(broken + H200, 0)))
    assert len(facts.gpus) == 2
    assert len(facts.findings) == 1


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"nvidia": ("", 127)}, []),
        ({"nvidia": ("", 127), "pci": slot("0000:00:02.0", "0x8086", -1)}, []),
        ({"nvidia": ("", 127), "pci": slot("0000:0b:00.0", "0x10de", -1, "0x068000")}, []),
        ({"nvidia": ("", 127), "gpunodes": "/dev/nvidia0"}, ["1 NVIDIA GPU in this host, and no nvidia-smi"]),
        ({"nvidia": ("", 127), "pci": slot("0000:01:00.0", "0x10de", 0) + slot("0000:02:00.0", "0x10de", 0)},
         ["2 NVIDIA GPUs in this host, and no nvidia-smi"]),
        ({"nvidia": ("", 124)}, ["nvidia-smi did not answer within 20 s"]),
        ({"nvidia": ("Segmentation fault", 139)},
         ["nvidia-smi exited with status 139 and printed: Segmentation fault"]),
    ],
)  # fmt: skip
def test_a_missing_tool_is_a_finding_only_where_there_is_a_gpu(
    parts: dict[str, str | tuple[str, int]], found: list[str]
) -> None:
    assert [finding.what for finding in parse_probe(answer(**parts)).findings] == found


@given(st.lists(st.tuples(st.sampled_from(
    ["uname", "cores", "numa", "memory", "memorylimit", "netdev", "sysnet", "iplink", "ipaddr", "fibtrie", "inet6",
     "route", "disk", "time", "connection", "pci", "nvidia", "gpunodes", "lscpu", "nvidiatopo", "nvidiapeers", "nvlink",
     "rdma", "rocm", "rocmcards"]
), st.text(alphabet="0123456789abcdef.:/-|, \t\nxMiBLOCALhost=<>@%", max_size=60)), max_size=6))  # fmt: skip
def test_nothing_that_a_host_prints_is_an_error(parts: list[tuple[str, str]]) -> None:
    facts = parse_probe(answer(**dict(parts)))
    assert facts.cores >= 0
