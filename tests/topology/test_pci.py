"""PCI trees from lspci in its forms and from /sys: the same machine told in several ways is the same tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.pci import address, gigatransfers, lanes, read_pci
from psctl.topology.readings import PciDevice

PLAIN = """\
00:00.0 Host bridge: Intel Corporation Device 09a2 (rev 04)
17:01.0 PCI bridge: Intel Corporation Device 352a (rev 04)
18:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
19:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
19:01.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
1a:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
1b:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
c1:00.0 Display controller: Advanced Micro Devices, Inc. [AMD/ATI] Device 74a1
"""
NUMBERS = """\
00:00.0 Host bridge [0600]: Intel Corporation Device [8086:09a2] (rev 04)
0001:1b:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 SXM5 80GB] [10de:2330] (rev a1)
1a:00.0 0207: 15b3:1021
03:00.0 VGA compatible controller [0300]: ASPEED Technology, Inc. ASPEED [1a03:2000] (rev 52) (prog-if 00 [VGA])
"""
VERBOSE = """\
17:01.0 PCI bridge: Intel Corporation Device 352a (rev 04) (prog-if 00 [Normal decode])
\tControl: I/O- Mem+ BusMaster+
\tNUMA node: 0
\tBus: primary=17, secondary=18, subordinate=1b, sec-latency=0
\tCapabilities: [40] Express (v2) Root Port (Slot+), MSI 00
\t\tLnkCap:\tPort #1, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s (ok), Width x16 (ok)
\t\tLnkCap2: Supported Link Speeds: 2.5-32GT/s, Crosslink- Retimer+ 2Retimers+ DRS-

18:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tBus: primary=18, secondary=19, subordinate=1b, sec-latency=0
19:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tBus: primary=19, secondary=1b, subordinate=1b, sec-latency=0
19:01.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)
\tBus: primary=19, secondary=1a, subordinate=1a, sec-latency=0

1a:00.0 Infiniband controller: Mellanox Technologies MT2910 Family [ConnectX-7]
\tFlags: bus master, fast devsel, latency 0, IRQ 18, NUMA node 1, IOMMU group 24
1b:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\tNUMA node: 0
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x4 (downgraded)
"""
TREE = """\
-+-[0000:17]-+-00.0
 |           \\-01.0-[18-1b]----00.0-[19-1b]--+-00.0-[1b]----00.0
 |                                           \\-01.0-[1a]--+-00.0
 |                                                        \\-00.1
 +-[0000:80]---01.1-[81]--
 \\-[0000:00]-+-00.0
             +-1f.0
             \\-1f.2
"""
NAMED = """\
-[0001:00]-+-00.0  Intel Corporation Device [8086:09a2]
           +-01.0-[01]----00.0  NVIDIA Corporation GH100 [10de:2330]
           \\-02.0-[02]--+-00.0  Mellanox Technologies MT2910 [15b3:1021]
                        \\-00.1  Mellanox Technologies MT2910 [15b3:1021]
"""
CHAIN = ("0000:17:01.0", "0000:18:00.0", "0000:19:00.0")


def by_address(text: str) -> dict[str, PciDevice]:
    return {device.address: device for device in read_pci(text).devices}


def test_plain_lines_have_class_and_maker_as_words() -> None:
    found = by_address(PLAIN)
    assert len(found) == 8
    card, amd, port = found["0000:1b:00.0"], found["0000:c1:00.0"], found["0000:1a:00.0"]
    assert (card.pci_class, card.vendor, card.name) == (0x0302, 0x10DE, "NVIDIA Corporation GH100 [H100 SXM5 80GB]")
    assert (amd.pci_class, amd.vendor) == (0x0380, 0x1002)
    assert (port.pci_class, port.vendor, port.path) == (0x0207, 0x15B3, ())


def test_numbers_are_taken_where_they_are() -> None:
    found = by_address(NUMBERS)
    card, port, screen = found["0001:1b:00.0"], found["0000:1a:00.0"], found["0000:03:00.0"]
    assert (card.pci_class, card.vendor, card.device) == (0x0302, 0x10DE, 0x2330)
    assert card.name == "NVIDIA Corporation GH100 [H100 SXM5 80GB]"
    assert (port.pci_class, port.vendor, port.device) == (0x0207, 0x15B3, 0x1021)
    assert (screen.pci_class, screen.vendor) == (0x0300, 0x1A03)


def test_verbose_lines_have_bridges_nodes_speed_and_width() -> None:
    found = by_address(VERBOSE)
    card, port = found["0000:1b:00.0"], found["0000:1a:00.0"]
    assert card.path == CHAIN
    assert (card.speed, card.speed_max, card.width, card.width_max, card.numa) == (2.5, 32.0, 4, 16, 0)
    assert (port.path, port.numa, port.speed) == ((*CHAIN[:2], "0000:19:01.0"), 1, None)
    assert (found["0000:17:01.0"].path, found["0000:17:01.0"].speed_max) == ((), 32.0)


def test_without_root_lspci_hides_the_slots() -> None:
    found = read_pci("1b:00.0 3D controller: NVIDIA Corporation GH100\n\tCapabilities: <access denied>\n")
    assert "without root" in found.findings[0].what
    assert read_pci(VERBOSE).findings == ()


def test_the_drawn_tree() -> None:
    found = by_address(TREE)
    assert found["0000:1b:00.0"].path == CHAIN
    assert found["0000:1a:00.1"].path == (*CHAIN[:2], "0000:19:01.0")
    assert found["0000:80:01.1"].pci_class == found["0000:18:00.0"].pci_class == 0x0604
    assert found["0000:00:1f.2"].path == found["0000:17:01.0"].path == ()
    assert len(found) == 12
    assert read_pci(TREE).findings == ()


def test_the_drawn_tree_with_names() -> None:
    found = by_address(NAMED)
    assert (found["0001:01:00.0"].vendor, found["0001:01:00.0"].device) == (0x10DE, 0x2330)
    assert (found["0001:01:00.0"].name, found["0001:01:00.0"].path) == ("NVIDIA Corporation GH100", ("0001:00:01.0",))
    assert found["0001:02:00.1"].path == ("0001:00:02.0",)


def test_rows_of_the_probe() -> None:
    folder = "/sys/devices/pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0"
    text = (
        f"0000:1b:00.0\t0x030200\t0x10de\t0x2330\t0\t2.5 GT/s PCIe\t32.0 GT/s PCIe\t16\t16\t{folder}/0000:1b:00.0\n"
        f"0000:19:00.0\t0x060400\t0x1000\t0xc030\t-1\tUnknown\t32.0 GT/s PCIe\t0\t255\t{folder}\n"
    )
    card, bridge = read_pci(text).devices
    assert card == PciDevice("0000:1b:00.0", 0x0302, 0x10DE, 0x2330, "", CHAIN, 2.5, 32.0, 16, 16, 0)
    assert bridge == PciDevice("0000:19:00.0", 0x0604, 0x1000, 0xC030, "", CHAIN[:2], None, 32.0, None, None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("00000000:3B:00.0", "0000:3b:00.0"), ("3b:00.0", "0000:3b:00.0"), ("10000:E1:00.0", "10000:e1:00.0"),
     ("ffff:ff:01.0", "ffff:ff:01.0"), ("3b:00", ""), ("GPU0", "")],
)  # fmt: skip
def test_addresses_are_written_as_sys_does(text: str, expected: str) -> None:
    assert address(text) == expected


def test_speeds_and_widths() -> None:
    assert [gigatransfers(text) for text in ("16.0 GT/s PCIe", "8 GT/s", "2.5GT/s", "Unknown speed", "")] == [
        16.0, 8.0, 2.5, None, None,
    ]  # fmt: skip
    assert [lanes(text) for text in ("16", "x8", "0", "255", "")] == [16, 8, None, None, None]


@given(
    st.integers(0, 1500),
    st.text("0123456789abc:.[]-+\\| \n\t", max_size=8),
    st.integers(0, 60),
    st.sampled_from([VERBOSE, TREE, NAMED, PLAIN]),
)
def test_no_garbling_is_an_error(at: int, put: str, lost: int, text: str) -> None:
    for device in read_pci(text[:at] + put + text[at + lost :]).devices:
        assert device.address == address(device.address)
