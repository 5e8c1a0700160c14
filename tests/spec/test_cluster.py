"""cluster.yaml is read as in the contract with the user; every mistake is reported with place, path and remedy."""

from __future__ import annotations

import pytest

from psctl.errors import InvalidFile
from psctl.spec.cluster import HostSpec, load_cluster, local_cluster
from psctl.spec.hosts import read_found

FULL = """\
version: 1
name: lab
ssh:                            # ~/.ssh/config is honoured; these override
  user: ubuntu
  port: 22
  identity_file: ~/.ssh/id_ed25519
  proxy_jump: bastion
  host_key_policy: strict       # strict | accept-new
  connect_timeout: 10s
network: {interface: auto, ports: null, congestion: auto}
runtime: {python: python3, environment: managed, workdir: ~/.psctl/host, torch: auto, requirements: [],
          wheelhouse: null, index: null, env: {}}
hosts:
  - node-a
  - node[02-04]
  - {address: 10.0.0.5, name: node-b, user: root, port: 2222, internal_address: 192.168.1.5, slots: 4,
     roles: [worker], labels: {rack: r1}}
  - {address: local}
links: []
"""


def load(text: str) -> object:
    return load_cluster(text, "c.yaml")


def test_the_documented_file_is_read_whole() -> None:
    spec = load_cluster(FULL, "c.yaml")
    assert spec.name == "lab"
    assert spec.source == "c.yaml"
    assert (spec.ssh.user, spec.ssh.port, spec.ssh.proxy_jump) == ("ubuntu", 22, "bastion")
    assert (spec.ssh.host_key_policy, spec.ssh.connect_timeout) == ("strict", 10.0)
    assert (spec.runtime.environment, spec.runtime.torch, spec.runtime.requirements) == ("managed", "auto", ())
    assert [host.name for host in spec.hosts] == ["node-a", "node02", "node03", "node04", "node-b", "local"]
    assert spec.host("node-b") == HostSpec(
        address="10.0.0.5", name="node-b", user="root", port=2222, internal_address="192.168.1.5", slots=4,
        roles=("worker",), labels={"rack": "r1"},
    )  # fmt: skip
    assert [host.local for host in spec.hosts] == [False] * 5 + [True]
    assert spec.links == ()


def test_defaults_are_those_of_the_contract() -> None:
    spec = load_cluster("name: x\nhosts: [a]", "c.yaml")
    assert (spec.ssh.user, spec.ssh.port, spec.ssh.host_key_policy, spec.ssh.connect_timeout) == (
        None, None, "strict", 10.0,
    )  # fmt: skip
    assert (spec.network.interface, spec.network.ports, spec.network.congestion) == ("auto", None, "auto")
    assert (spec.runtime.python, spec.runtime.environment, spec.runtime.workdir) == (
        "python3", "managed", "~/.psctl/host",
    )  # fmt: skip
    assert spec.hosts == (HostSpec(address="a", name="a", roles=("worker", "server")),)


def test_a_section_whose_lines_are_all_commented_out_has_its_defaults() -> None:
    assert load_cluster("name: x\nssh:\nlinks:\nhosts: [a]", "c.yaml").ssh.host_key_policy == "strict"


def test_texts_stay_texts() -> None:
    spec = load_cluster("name: x\nruntime: {torch: 2.10, env: {A: on, B: 08, C: 1.50, D: ''}}\nhosts: [10.0.0.1]", "c")
    assert spec.runtime.torch == "2.10"
    assert spec.runtime.env == {"A": "on", "B": "08", "C": "1.50", "D": ""}
    assert spec.hosts[0].name == "10.0.0.1"


def test_ports_are_a_range() -> None:
    assert load_cluster("name: x\nnetwork: {ports: 29400-29499}\nhosts: [a]", "c").network.ports == (29400, 29499)


def test_a_range_may_carry_keys_that_all_its_hosts_share() -> None:
    spec = load_cluster("name: x\nhosts: [{address: 'n[1,3-4]', slots: 2}]", "c")
    assert [(host.name, host.slots) for host in spec.hosts] == [("n1", 2), ("n3", 2), ("n4", 2)]


def test_the_embedded_cluster_is_this_machine() -> None:
    spec = local_cluster(cores=3)
    assert [(host.name, host.local, host.slots) for host in spec.hosts] == [("local", True, 3)]
    assert spec.runtime.environment == "existing"
    assert (local_cluster().hosts[0].slots or 0) >= 1


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "c.yaml:1:1", "the file is empty"),
        ("- a\n", "c.yaml:1:1", "expected keys with values, got a list"),
        ("name: x\nhosts: [{address: a, port: 0}]", "c.yaml:2:28", "hosts[0].port: expected 1..65535, got 0"),
        ("name: x\nhosts: [{address: a, port: '22'}]", "c.yaml:2:28", 'hosts[0].port: expected 1..65535, got "22"'),
        ("name: x\nhosts: [{addres: a}]", "c.yaml:2:10", 'hosts[0].addres: unknown key, did you mean "address"?'),
        ("name: x\nhosts: [a]\nshh: {}", "c.yaml:3:1", 'shh: unknown key, did you mean "ssh"?'),
        ("name: x\nhosts: [a]\nssh: {uesr: b}", "c.yaml:3:7", 'ssh.uesr: unknown key, did you mean "user"?'),
        ("name: x\nhosts: [a, b, a]", "c.yaml:2:15", 'hosts[2].name: duplicate name "a", first at c.yaml:2:9'),
        ("name: x\nhosts: [a1, 'a[1-2]']", "c.yaml:2:13", 'hosts[1].name: duplicate name "a1"'),
        ("name: x\nhosts: []", "c.yaml:2:8", "hosts: no host"),
        ("name: x\nhosts: a", "c.yaml:2:8", "hosts: expected a list, got a"),
        ("name: x\n", "c.yaml:1:1", "hosts: missing"),
        ("hosts: [a]", "c.yaml:1:1", "name: missing"),
        ("name: x.yaml\nhosts: [a]", "c.yaml:1:7", "name: expected a name"),
        ("version: 2\nname: x\nhosts: [a]", "c.yaml:1:10", "version: expected 1, got 2"),
        ("name: x\nhosts: ['-oProxyCommand=id']", "c.yaml:2:9", "hosts[0].address: expected a host name"),
        ("name: x\nhosts: [ubuntu@a]", "c.yaml:2:9", "expected a name or an address"),
        ("name: x\nhosts: ['a:2222']", "c.yaml:2:9", "expected a name or an address"),
        ("name: x\nhosts: ['n[5-2]']", "c.yaml:2:9", "the range 5-2 runs backwards"),
        ("name: x\nhosts: ['n[1-999999999]']", "c.yaml:2:9", "more than 4096 hosts"),
        ("name: x\nhosts: [{address: 'n[1-2]', name: b}]", "c.yaml:2:35", "hosts[0].name: a range of hosts cannot"),
        ("name: x\nhosts: [{address: local, user: u}]", "c.yaml:2:9", "`local` is reached without SSH"),
        ("name: x\nhosts: [{address: local}, {address: local, name: b}]", "c.yaml:2:8", "is listed twice"),
        ("name: x\nhosts: [{address: a, roles: [wroker]}]", "c.yaml:2:30", 'did you mean "worker"?'),
        ("name: x\nhosts: [{address: a, roles: []}]", "c.yaml:2:9", "a host without a role"),
        ("name: x\nhosts: [a]\nssh: {connect_timeout: 10}", "c.yaml:3:24", 'ssh.connect_timeout: "10": expected'),
        ("name: x\nhosts: [a]\nssh: {host_key_policy: no}", "c.yaml:3:24", "expected strict | accept-new"),
        ("name: x\nhosts: [a]\nnetwork: {ports: 29499-29400}", "c.yaml:3:18", "expected a rising range"),
        ("name: x\nhosts: [a]\nnetwork: {ports: 29400}", "c.yaml:3:18", "a range of ports such as 29400-29499"),
        ("name: x\nhosts: [a]\nruntime: {environment: manged}", "c.yaml:3:24", 'did you mean "managed"?'),
        (
            "name: x\nhosts: [a]\nruntime: {environment: existing, requirements: [numpy]}", "c.yaml:3:48",
            "runtime.requirements: to an existing environment only",
        ),
        ("name: x\nhosts: [a]\nruntime: {env: {A-B: 1}}", "c.yaml:3:17", "runtime.env.A-B: expected the name of a var"),
        ("name: x\nhosts: [a]\nruntime: [a]", "c.yaml:3:10", "runtime: expected keys with values, got a list"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_place_path_and_nearest_name(text: str, where: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        load(text)
    assert caught.value.where == where
    assert says in caught.value.message


def test_user_at_host_is_answered_with_how_it_is_written_here() -> None:
    with pytest.raises(InvalidFile) as caught:
        load("name: x\nhosts: ['ubuntu@node-a:2222']")
    assert caught.value.hint == "write {address: node-a, user: ubuntu, port: 2222}"


PODS = "name: x\nkind: command\nexec: kubectl exec {host} -i -- {command}\n"


def test_hosts_may_be_reached_by_a_command() -> None:
    spec = load_cluster(f"{PODS}hosts: ['pod-[0-1]', {{address: pod-2, slots: 3}}, {{address: local}}]", "c")
    assert (spec.kind, spec.exec) == ("command", "kubectl exec {host} -i -- {command}")
    assert [(host.address, host.slots) for host in spec.hosts] == [
        ("pod-0", None), ("pod-1", None), ("pod-2", 3), ("local", None),
    ]  # fmt: skip
    assert load_cluster("name: x\nhosts: [a]", "c").kind == "ssh"


def test_hosts_may_come_from_a_command() -> None:
    text = f'{PODS}hosts: {{from: "kubectl get pods -o name"}}'
    spec = load_cluster(text, "c")
    assert (spec.hosts, spec.hosts_command) == ((), "kubectl get pods -o name")
    found = read_found("pod/train-0\n\n train-1 \n", spec.hosts_command)
    assert load_cluster(text, "c", found).hosts == (
        HostSpec(address="train-0", name="train-0"), HostSpec(address="train-1", name="train-1"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("", "printed no host"),
        ("a\na\n", "printed a twice"),
        ("a\n-oProxyCommand=id\n", "printed '-oProxyCommand=id', which is no name of a host"),
        ("\x1b[31mred\n", r"printed '\x1b[31mred', which is no name"),
        ("NAME READY\n", "printed 'NAME READY', which is no name"),
    ],
)
def test_what_a_command_prints_in_place_of_hosts_is_refused(printed: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        read_found(printed, "kubectl get pods")
    assert "hosts.from: `kubectl get pods` " + says in caught.value.message


def test_slurm_has_the_nodes_of_its_allocation_and_a_workdir_for_each() -> None:
    spec = load_cluster("name: x\nkind: slurm", "c")
    assert (spec.hosts, spec.runtime.workdir) == ((), "~/.psctl/nodes/{host}")
    spec = load_cluster("name: x\nkind: slurm\nruntime: {workdir: /s}", "c", ["n1", "n2"], "4711")
    assert ([host.name for host in spec.hosts], spec.allocation, spec.runtime.workdir) == (["n1", "n2"], "4711", "/s")


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("nodes: 2\nhosts: [a]", "c:2:8", "nodes: an allocation of Slurm has it, and kind: ssh has none"),
        ("kind: slurm\nextra: [qos]", "c:3:9", "extra[0]: expected an option of sbatch such as --qos=high, got qos"),
        ("kind: slurm\nhosts: [a]", "c:3:8", "hosts: kind: slurm uses the nodes of the allocation"),
        ("kind: slurm\nexec: a {command}", "c:3:7", "exec: kind: slurm reaches hosts without it"),
        ("kind: slurm\nssh: {user: u}", "c:3:13", "ssh.user: kind: slurm uses no SSH"),
        ("kind: command\nhosts: [a]", "c:2:7", "kind: command, but exec: is missing"),
        ("exec: a {command}\nhosts: [a]", "c:2:7", "exec: kind: ssh reaches hosts without it"),
        ("kind: command\nexec: a {host}\nhosts: [a]", "c:3:7", "exec: no place for the command that psctl runs"),
        ("kind: command\nexec: a {command} {line}\nhosts: [a]", "c:3:7", "more than one place for the command"),
        ("kind: command\nexec: 'a {command} \"b'\nhosts: [a]", "c:3:7", "cannot be split into words: no closing quot"),
        ("kind: command\nexec: a {hots} {command}\nhosts: [a]", "c:3:7", 'unknown place {hots}, did you mean "host"?'),
        ("kind: command\nexec: a --run={command}\nhosts: [a]", "c:3:7", "{command} stands for several words"),
        ("kind: command\nexec: bin/a {command}\nhosts: [a]", "c:3:7", "bin/a is a relative path"),
        ("kind: command\nexec: '{command}'\nhosts: [a]", "c:3:7", "the program that reaches the host comes first"),
        ("kind: command\nexec: a {command}\nhosts: [a, b]", "c:3:7", "without {host} every command would reach the"),
        ("kind: command\nexec: a {command}\nhosts: {from: b}", "c:3:7", "without {host} every command would reach the"),
        ("kind: command\nexec: a {command}\nssh: {user: u}\nhosts: [a]", "c:4:13", "ssh.user: kind: command uses no"),
        (
            "kind: command\nexec: a {host} {command}\nhosts: [a, {address: b, port: 22}]", "c:4:31",
            "hosts[1].port: kind: command logs in by exec: alone",
        ),
        ("kind: comand\nhosts: [a]", "c:2:7", 'kind: unknown value comand, did you mean "command"?'),
        ("hosts: {form: a}", "c:2:9", "hosts.form: unknown key"),
        ("hosts: {}", "c:2:8", "hosts: expected a list"),
        ("hosts: {from: [a]}", "c:2:15", "hosts.from: expected a command that prints one host a line"),
        ("hosts: {from: 'a \"b'}", "c:2:15", "hosts.from: No closing quotation"),
        ("hosts: {from: ./list}", "c:2:15", "hosts.from: ./list is a relative path"),
    ],
)  # fmt: skip
def test_a_way_to_hosts_that_cannot_be_is_refused_with_its_place(text: str, where: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        load_cluster(f"name: x\n{text}", "c")
    assert caught.value.where == where
    assert says in caught.value.message
    assert caught.value.hint


RACKS = "name: x\nhosts: [{address: a, labels: {rack: r1}}, {address: node-b, labels: {rack: r2}}]\n"


def test_links_join_hosts_and_values_of_labels() -> None:
    text = "links: [{between: [r1, r2], bandwidth: 10 Gbit/s, latency: 50 us}, {between: [a, r2], bandwidth: 1 GB/s}]"
    first, second = load(RACKS + text).links
    assert (first.between, first.bandwidth, first.latency) == (("r1", "r2"), 1.25e9, pytest.approx(50e-6))
    assert (second.between, second.bandwidth, second.latency) == (("a", "r2"), 1e9, None)


@pytest.mark.parametrize(
    ("link", "where", "says"),
    [
        ("{between: [r1, nodeb], bandwidth: 1 GB/s}", "c.yaml:3:24", '"nodeb" is neither a host nor a value'),
        ("{between: [r1, nodeb], bandwidth: 1 GB/s}", "c.yaml:3:24", 'did you mean "node-b"?'),
        ("{between: [r1], bandwidth: 1 GB/s}", "c.yaml:3:19", "links[0].between: a link has two different ends"),
        ("{between: [a, a], bandwidth: 1 GB/s}", "c.yaml:3:19", "two different ends"),
        ("{between: [a, node-b, r1], bandwidth: 1 GB/s}", "c.yaml:3:19", "two different ends"),
        ("{between: [a, r2], bandwidth: 0 GB/s}", "c.yaml:3:39", "links[0].bandwidth: a link with a bandwidth of 0"),
        ("{between: [a, r2], bandwidth: 10 Gb}", "c.yaml:3:39", "unknown unit"),
        ("{between: [a, r2]}", "c.yaml:3:9", "links[0].bandwidth: missing"),
        (
            "{between: [a, r2], bandwidth: 1 GB/s}, {between: [r2, a], bandwidth: 2 GB/s}", "c.yaml:3:58",
            "links[1].between: the same two ends as links[0]",
        ),
    ],
)  # fmt: skip
def test_a_link_that_makes_no_sense_is_reported_with_its_place(link: str, where: str, says: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        load(f"{RACKS}links: [{link}]")
    assert caught.value.where == where
    assert says in caught.value.message


def test_an_index_beside_a_wheelhouse_is_refused() -> None:
    with pytest.raises(InvalidFile, match="wheelhouse: is given too"):
        load_cluster("name: x\nhosts: [a]\nruntime: {wheelhouse: w, index: https://example.org/simple}\n", "c")


def test_a_range_in_a_list_on_one_line_gets_a_hint_to_quote_it() -> None:
    with pytest.raises(InvalidFile, match="not YAML") as raised:
        load_cluster("name: x\nhosts: [node[01-04]]\n", "c")
    assert "needs quotes" in raised.value.hint
    assert len(load_cluster('name: x\nhosts: ["node[01-04]"]\n', "c").hosts) == 4
