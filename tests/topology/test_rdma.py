"""RDMA ports, from the probe's rows of /sys and from the tools that people save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.topology.readers.rdma import looks_like_rdma, read_rdma
from psctl.topology.readings import RdmaPort

ROWS = (
    "mlx5_0\t1\t400 Gb/sec (4X NDR)\t4: ACTIVE\tInfiniBand\t0000:18:00.0\t0\t\t ib0=0\n"
    "mlx5_3\t1\t100 Gb/sec (4X EDR)\t4: ACTIVE\tEthernet\t0000:5d:00.0\t-1\tens1f0np0\t ens1f0np0=0\n"
    "mlx5_4\t1\t10 Gb/sec (4X SDR)\t1: DOWN\tInfiniBand\t0000:9a:00.0\t1\t\t\n"
    "mlx4_0\t2\t56 Gb/sec (4X FDR)\t4: ACTIVE\tEthernet\t0000:21:00.0\t0\t\t eth2=0 eth3=1\n"
)
IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tBase lid: 3
\t\tLink layer: InfiniBand
CA 'mlx4_0'
\tCA type: MT4103
\tNumber of ports: 2
\tPort 1:
\t\tState: Down
\t\tPhysical state: Polling
\t\tRate: 10
\t\tLink layer: InfiniBand
\tPort 2:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 40
\t\tLink layer: Ethernet
"""
IBSTATUS = """\
Infiniband device 'mlx5_2' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:b8ce:f603:00a7:d492
\tbase lid:\t 0x5
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 200 Gb/sec (4X HDR)
\tlink_layer:\t InfiniBand
"""


def test_rows_of_the_probe() -> None:
    assert read_rdma(ROWS).ports == (
        RdmaPort("mlx5_0", 1, 50e9, True, "InfiniBand", "0000:18:00.0", "ib0", 0),
        RdmaPort("mlx5_3", 1, 12.5e9, True, "Ethernet", "0000:5d:00.0", "ens1f0np0", None),
        RdmaPort("mlx5_4", 1, None, False, "InfiniBand", "0000:9a:00.0", "", 1),
        RdmaPort("mlx4_0", 2, 7e9, True, "Ethernet", "0000:21:00.0", "eth3", 0),
    )


def test_ibstat_with_two_ports_and_one_that_is_down() -> None:
    assert read_rdma(IBSTAT).ports == (
        RdmaPort("mlx5_0", 1, 50e9, True, "InfiniBand"),
        RdmaPort("mlx4_0", 1, None, False, "InfiniBand"),
        RdmaPort("mlx4_0", 2, 5e9, True, "Ethernet"),
    )


def test_ibstatus() -> None:
    assert read_rdma(IBSTATUS).ports == (RdmaPort("mlx5_2", 1, 25e9, True, "InfiniBand"),)


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("mlx5_0 port 1 ==> ib0 (Up)", RdmaPort("mlx5_0", 1, active=True, interface="ib0")),
        ("roceP2p1s0f1 port 1 ==> enP2p1s0f1np1 (Down)", RdmaPort("roceP2p1s0f1", 1, interface="enP2p1s0f1np1")),
        ("0000:03:00.0 mlx5_0 (MT4119 - MCX556A-ECAT) CX556A - ConnectX-5 fw 16.24.1000 port 1 (ACTIVE) ==> ib0 (Up)",
         RdmaPort("mlx5_0", 1, active=True, bus="0000:03:00.0", interface="ib0")),
        ("link mlx5_1/1 state ACTIVE physical_state LINK_UP netdev enp1s0f1",
         RdmaPort("mlx5_1", 1, active=True, interface="enp1s0f1")),
        ("0/1: mlx5_0/1: state DOWN physical_state DISABLED", RdmaPort("mlx5_0", 1)),
    ],
)  # fmt: skip
def test_one_line_a_port(line: str, port: RdmaPort) -> None:
    assert looks_like_rdma(line)
    assert read_rdma(line).ports == (port,)


def test_one_port_in_the_output_of_two_tools_is_one_port() -> None:
    assert read_rdma(IBSTAT + "mlx5_0 port 1 ==> ib0 (Down)\n").ports[0] == RdmaPort(
        "mlx5_0", 1, 50e9, True, "InfiniBand", interface="ib0"
    )


def test_no_port_is_a_finding() -> None:
    assert read_rdma("CA 'mlx5_0'\n\tCA type: MT4129\n").findings[0].what == "no RDMA port could be read"


@given(st.integers(0, 600), st.text(max_size=8), st.integers(0, 40), st.sampled_from([ROWS, IBSTAT, IBSTATUS]))
def test_no_garbling_is_an_error(at: int, put: str, lost: int, text: str) -> None:
    read_rdma(text[:at] + put + text[at + lost :])
