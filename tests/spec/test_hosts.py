"""Host ranges, host lists and hostfiles; cluster.yaml written from them is read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import InvalidFile
from psctl.spec.cluster import load_cluster
from psctl.spec.hosts import HostLine, expand, read_host_list, read_hostfile, write_cluster


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node-a", ["node-a"]),
        ("node[02-04]", ["node02", "node03", "node04"]),
        ("node[1,3-5]", ["node1", "node3", "node4", "node5"]),
        ("gpu[8-11].lab", ["gpu8.lab", "gpu9.lab", "gpu10.lab", "gpu11.lab"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[7]", ["n7"]),
    ],
)
def test_ranges(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("text", ["n[", "n]", "n[]", "n[a-b]", "n[1-]", "n[1-2][3-4]", "n[2-1]", "n[1-5000]", "n[-1]"])
def test_a_malformed_range_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|numbers|more than"):
        expand(text)


@given(st.integers(0, 999), st.integers(0, 200))
def test_a_range_has_all_its_numbers(first: int, more: int) -> None:
    assert expand(f"n[{first}-{first + more}]") == [f"n{number}" for number in range(first, first + more + 1)]


def test_a_hostfile_of_mpi_and_deepspeed() -> None:
    text = "# cluster\nworker-0 slots=4\nworker-1 slots=8 max_slots=8  # big\n\nworker-2\nworker-3:2\n"
    assert read_hostfile(text, "hostfile") == [
        HostLine("worker-0", 4), HostLine("worker-1", 8), HostLine("worker-2", None), HostLine("worker-3", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "where"),
    [("", "h:1:1"), ("# none\n", "h:1:1"), ("a slots=x\n", "h:1:1"), ("a\nb c\n", "h:2:1"), ("a\nb\na\n", "h:3:1"),
     ("-oProxyCommand=id\n", "h:1:1")],
)  # fmt: skip
def test_the_error_for_a_bad_hostfile_names_the_line(text: str, where: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        read_hostfile(text, "h")
    assert caught.value.where == where


def test_a_list_of_hosts_from_the_command_line() -> None:
    hosts = read_host_list("node-a, 10.0.0.5,n[1,3-4],fe80::1")
    assert [host.address for host in hosts] == ["node-a", "10.0.0.5", "n1", "n3", "n4", "fe80::1"]


@pytest.mark.parametrize("text", ["", " , ", "a,a", "a b", "-x", "u@h", "n[1"])
def test_a_bad_list_of_hosts_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"host|range"):
        read_host_list(text)


def test_the_cluster_file_that_is_written_is_read_back() -> None:
    hosts = [HostLine("node-a", None), HostLine("10.0.0.5", 4), HostLine("no", 2), HostLine("fe80::1", None)]
    spec = load_cluster(write_cluster("mine", hosts), "cluster.yaml")
    assert spec.name == "mine"
    assert [HostLine(host.address, host.slots) for host in spec.hosts] == hosts
