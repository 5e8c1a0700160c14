"""Topology files of NCCL and RCCL: elements are where they stand in the tree; what is cut or foreign does no harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.nccl_xml import read_nccl
from psctl.topology.readings import NcclGpu, NcclNet

CAPTURED = Path(__file__).parent.parent / "captured" / "nccl-xml"
FILES = sorted(CAPTURED.glob("*.xml"))

SWITCHED = """\
<?xml version="1.0"?>
<system version="1">
  <cpu host_hash="0x1" numaid="1" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:4C:00.0" class="0x060400" vendor="0x1000" device="0xc030"
         link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:4e:00.0" class="0x03" link_speed="" link_width="0">
        <gpu dev="3" sm="90" rank="3" gdr="1">
          <nvlink target="0000:b3:00.0" count="8" tclass="0x068000"/>
          <nvlink target="fffffff:ffff:ff" count="10" tclass="0x068000"/>
          <nvlink target="0000:4f:00.0" count="2"/>
        </gpu>
      </pci>
      <pci busid="0000:4f:00.0" class="0x020700" link_speed="8 GT/s" link_width="8">
        <nic><net name="mlx5_2" dev="2" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/></nic>
      </pci>
    </pci>
    <nic><net name="eth0" dev="3" speed="-1" port="0"/></nic>
  </cpu>
</system>
"""


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_files_of_real_machines_hold_what_was_counted_by_hand(path: Path) -> None:
    found = read_nccl(path.read_text())
    facts = json.loads(path.with_suffix(".json").read_text())["counts"]
    counts = {
        "cpu": len(found.cpus), "pci": len(found.pci), "gpu": len(found.gpus), "net": len(found.nets),
        "nvlink": sum(len(gpu.nvlinks) for gpu in found.gpus), "xgmi": sum(len(gpu.xgmis) for gpu in found.gpus),
    }  # fmt: skip
    assert counts == facts
    assert found.findings == ()


def test_slots_gpus_and_nics_have_their_place() -> None:
    found = read_nccl(SWITCHED)
    bridge, card, port = found.pci
    assert (bridge.address, bridge.pci_class, bridge.path, bridge.speed, bridge.width) == (
        "0000:4c:00.0", 0x0604, (), 32.0, 16,
    )  # fmt: skip
    assert (card.pci_class, card.path, card.speed, card.width, card.numa) == (0x0300, (bridge.address,), None, None, 1)
    assert (port.speed, port.width, port.pci_class) == (8.0, 8, 0x0207)
    assert found.gpus == (
        NcclGpu(3, "0000:4e:00.0", (
            ("0000:b3:00.0", 8, 0x0680), ("fffffff:ffff:ff", 10, 0x0680), ("0000:4f:00.0", 2, None),
        )),
    )  # fmt: skip
    assert found.nets == (NcclNet("mlx5_2", 50e9, "0000:4f:00.0", 1), NcclNet("eth0", None, "", 1))
    assert found.cpus == {1: "GenuineIntel"}


def test_bridges_nest() -> None:
    found = read_nccl((CAPTURED / "rccl-16p1h-xgmi.xml").read_text())
    paths = {device.address: device.path for device in found.pci}
    assert paths["0000:4e:00.0"] == ("0000:41:00.0", "0000:49:00.0", "0000:4c:00.0")
    assert found.gpus[0].xgmis == (("0000:51:00.0", 4), ("0000:56:00.0", 1), ("0000:0e:00.0", 2))


def test_a_cut_file_is_read_up_to_the_cut_and_reported() -> None:
    found = read_nccl(SWITCHED[: SWITCHED.index("<nic>")])
    assert (len(found.pci), len(found.gpus), found.nets) == (3, 1, ())
    assert [finding.what.split(" (")[0] for finding in found.findings] == ["the XML is cut or broken"]


def test_a_file_without_its_beginning_is_read_from_the_first_element_on() -> None:
    found = read_nccl(SWITCHED[SWITCHED.index("<cpu") :])
    assert len(found.pci) == 3
    assert [finding.what for finding in found.findings] == ["the beginning of the topology file is missing"]


def test_a_machine_without_nodes_and_a_file_of_two_hosts() -> None:
    one = read_nccl('<system><cpu numaid="-1" host_hash="0x1" arch="arm64"><pci busid="0000:01:00.0"/></cpu></system>')
    assert (one.cpus, one.pci[0].numa, one.findings) == ({-1: "arm64"}, None, ())
    two = read_nccl('<system><cpu numaid="0" host_hash="0x1"/><cpu numaid="0" host_hash="0x2"/></system>')
    assert "holds 2 hosts" in two.findings[0].what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('<!DOCTYPE s [<!ENTITY a "b">]><system><cpu numaid="0"/></system>', "defines entities"),
        ('<! doctype s SYSTEM "x"><system/>', "defines entities"),
        ("<topology><object/></topology>", "is no topology file"),
        ("<system>" + " " * 8_000_000, "more than any machine's"),
    ],
)
def test_foreign_xml_is_refused(text: str, what: str) -> None:
    found = read_nccl(text)
    assert (found.pci, found.gpus) == ((), ())
    assert what in found.findings[0].what


@given(st.integers(0, len(SWITCHED)), st.text("<>/&\"'= a0\x00\x0b\udce9", max_size=4), st.integers(0, 40))
def test_no_garbling_is_an_error(at: int, put: str, lost: int) -> None:
    found = read_nccl(SWITCHED[:at] + put + SWITCHED[at + lost :])
    assert len(found.pci) <= 3
