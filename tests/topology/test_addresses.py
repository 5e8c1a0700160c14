"""Each host gets the address that the others should use, for a reason that is said."""

from __future__ import annotations

import msgspec
import pytest

from psctl.errors import HostUnreachable, InvalidFile
from psctl.topology.facts import HostFacts, Nic
from psctl.topology.network.addresses import ChosenAddress, HostReach, choose_addresses
from psctl.types import HostName

A, B, C = HostName("a"), HostName("b"), HostName("c")
LO = Nic("lo", ("127.0.0.1/8", "::1/128"), kind="loopback")
DOCKER = Nic("docker0", ("172.17.0.1/16",), kind="bridge")


def facts(*nics: Nic, connected: str = "", default: str = "", boot: str = "") -> HostFacts:
    return HostFacts(
        machine="x86_64", cores=2, cpu="", numa=(), memory=1,
        nics=(LO, DOCKER, *nics), gpus=(), findings=(), time=None, default_interface=default,
        connected=connected, boot=boot,
    )  # fmt: skip


def two(last: int, connected: str, boot: str = "") -> HostFacts:
    """A host with a slow interface that has the default route, and a fast one."""
    slow, fast = Nic("eth0", (f"10.0.0.{last}/24",)), Nic("ens1", (f"192.168.0.{last}/24",))
    return facts(slow, fast, connected=connected, default="eth0", boot=boot or f"boot-{last}")


def test_the_interface_that_psctl_came_in_at() -> None:
    chosen = choose_addresses({A: HostReach(two(1, "192.168.0.1")), B: HostReach(two(2, "192.168.0.2"))})
    assert chosen == {
        A: ChosenAddress("192.168.0.1", "ens1", "psctl reaches it on this interface"),
        B: ChosenAddress("192.168.0.2", "ens1", "psctl reaches it on this interface"),
    }


def test_an_internal_address_is_taken_as_it_is_given() -> None:
    hosts = {
        A: HostReach(two(1, "10.0.0.1"), internal_address="192.168.0.1"),
        B: HostReach(two(2, "10.0.0.2"), "8.8.8.8"),
    }
    chosen = choose_addresses(hosts, interface="eth0")
    assert [(one.address, one.interface) for one in chosen.values()] == [("192.168.0.1", "ens1"), ("8.8.8.8", "")]


def test_the_interface_that_the_cluster_file_names() -> None:
    chosen = choose_addresses({A: HostReach(two(1, "10.0.0.1")), B: HostReach(two(2, "10.0.0.2"))}, interface="ens1")
    assert [(one.address, one.interface) for one in chosen.values()] == [
        ("192.168.0.1", "ens1"),
        ("192.168.0.2", "ens1"),
    ]


def test_a_host_without_the_named_interface_is_named() -> None:
    with pytest.raises(InvalidFile, match="ib0 does not exist on a") as caught:
        choose_addresses({A: HostReach(two(1, "10.0.0.1")), B: HostReach(two(2, "10.0.0.2"))}, interface="ib0")
    assert caught.value.hint.startswith("it has: lo, docker0, eth0, ens1;")


def test_one_host_alone_stays_on_loopback() -> None:
    for host in (HostReach(two(1, "10.0.0.1")), HostReach(two(1, ""), local=True)):
        assert choose_addresses({A: host})[A] == ChosenAddress("127.0.0.1", "lo", "all processes are on one machine")


def test_hosts_that_share_one_machines_network_stay_on_loopback() -> None:
    hosts = {
        A: HostReach(two(1, "127.0.0.2", "same")),
        B: HostReach(two(1, "127.0.0.3", "same")),
        C: HostReach(two(1, "", "same"), local=True),
    }
    assert [one.address for one in choose_addresses(hosts).values()] == ["127.0.0.2", "127.0.0.3", "127.0.0.1"]


def test_namespaces_that_share_a_kernel_are_machines_of_their_own() -> None:
    chosen = choose_addresses({A: HostReach(two(1, "10.0.0.1", "same")), B: HostReach(two(2, "10.0.0.2", "same"))})
    assert [one.address for one in chosen.values()] == ["10.0.0.1", "10.0.0.2"]


def test_hosts_behind_tunnels_do_not_get_loopback() -> None:
    chosen = choose_addresses({A: HostReach(two(1, "127.0.0.1")), B: HostReach(two(2, "127.0.0.1"))})
    assert [(one.address, one.reason) for one in chosen.values()] == [
        ("10.0.0.1", "its default route"), ("10.0.0.2", "its default route"),
    ]  # fmt: skip


def test_this_machine_takes_the_subnet_of_the_others() -> None:
    chosen = choose_addresses({A: HostReach(two(1, ""), local=True), B: HostReach(two(2, "192.168.0.2"))})
    assert chosen[A] == ChosenAddress("192.168.0.1", "ens1", "it shares a subnet with the other hosts")


def test_a_bridge_of_containers_is_never_taken() -> None:
    with pytest.raises(HostUnreachable, match="a: no interface has an address that another host can reach"):
        choose_addresses({A: HostReach(facts(boot="1"), local=True), B: HostReach(two(2, "10.0.0.2"))})


def test_an_address_that_no_interface_shows_is_used_as_psctl_uses_it() -> None:
    chosen = choose_addresses({A: HostReach(facts(connected="10.9.9.9", boot="1")), B: HostReach(two(2, "10.0.0.2"))})
    assert chosen[A] == ChosenAddress("10.9.9.9", "", "psctl reaches it at this address")


def test_a_host_reached_over_ipv6_is_used_over_ipv4_where_that_interface_has_it() -> None:
    both = facts(Nic("eth0", ("10.0.0.7/24", "2001:db8::7/64")), connected="2001:db8::7", boot="1")
    six = facts(Nic("eth0", ("2001:db8::8/64",)), connected="2001:db8::8", boot="2")
    chosen = choose_addresses({A: HostReach(both), B: HostReach(six)})
    assert [one.address for one in chosen.values()] == ["10.0.0.7", "2001:db8::8"]


def test_equal_addresses_on_networks_of_their_own_are_refused() -> None:
    """As rootless containers have them: one kernel, two namespaces, 10.0.2.100 in both."""

    def container(netns: str) -> HostReach:
        inside = facts(Nic("tap0", ("10.0.2.100/24",)), connected="10.0.2.100", default="tap0", boot="same")
        return HostReach(msgspec.structs.replace(inside, netns=netns))

    with pytest.raises(HostUnreachable, match=r"a and b both have the address 10\.0\.2\.100") as caught:
        choose_addresses({A: container("net:[1]"), B: container("net:[2]")})
    assert "internal_address:" in caught.value.hint
    together = choose_addresses({A: container("net:[1]"), B: container("net:[1]")})
    assert [one.address for one in together.values()] == ["127.0.0.1", "127.0.0.1"], "one machine reached at two ports"
    with pytest.raises(HostUnreachable, match="loopback"):
        choose_addresses({A: HostReach(two(1, "10.0.0.1"), "127.0.0.1"), B: HostReach(two(2, "10.0.0.2"))})


@pytest.mark.parametrize(
    ("netns", "address", "chosen"),
    [
        ("net:[1]", "10.0.2.100/24", ["127.0.0.1", "127.0.0.1"]),
        ("", "10.0.2.100/24", None),
        ("net:[1]", "10.0.3.7/24", ["10.0.2.100", "10.0.3.7"]),
    ],
    ids=["known", "unknown", "nothing-in-common"],
)
def test_interfaces_of_containers_may_come_and_go_between_two_probes(
    netns: str, address: str, chosen: list[str] | None
) -> None:
    def probed(*nics: Nic) -> HostReach:
        return HostReach(msgspec.structs.replace(facts(*nics, default="eth0", boot="same"), netns=netns))

    before = probed(Nic("eth0", ("10.0.2.100/24",)))
    after = probed(Nic("eth0", (address,)), Nic("veth7", ("10.88.0.1/16",)))
    if chosen is None:
        with pytest.raises(HostUnreachable, match="both have the address"):
            choose_addresses({A: before, B: after})
    else:
        assert [one.address for one in choose_addresses({A: before, B: after}).values()] == chosen
