"""A fleet: many hosts at once, one host's trouble its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from psctl.errors import CommandFailed, HostKeyUnknown, HostUnreachable, PsctlError
from psctl.remote.fleet import AT_ONE_SSHD, Fleet
from psctl.remote.shell import Shell
from psctl.spec.cluster import ClusterSpec, HostSpec, SshSpec
from psctl.types import HostName
from tests.helpers.fake_shell import FakeShell


def cluster(*hosts: HostSpec, **ssh: Any) -> ClusterSpec:
    return ClusterSpec(name="lab", hosts=hosts, ssh=SshSpec(**ssh))


def three() -> Fleet:
    names = [HostName("a"), HostName("b"), HostName("c")]
    return Fleet({name: FakeShell(name) for name in names}, {HostName("d"): HostUnreachable("d: no route")})


def test_each_gives_an_outcome_a_host_in_order_also_for_the_unreached() -> None:
    def work(name: HostName, shell: Shell) -> str:
        if name == "b":
            shell.run(["false"])
        return shell.run(["echo", name]).stdout.decode().strip()

    outcomes = three().each(work)
    assert list(outcomes) == ["a", "b", "c", "d"]
    assert [outcomes[HostName(name)].ok for name in "abcd"] == [True, False, True, False]
    assert (outcomes[HostName("a")].value, type(outcomes[HostName("b")].error)) == ("a", CommandFailed)
    with pytest.raises(HostUnreachable):
        _ = outcomes[HostName("d")].value


def test_each_of_some_is_of_these_only() -> None:
    assert list(three().each(lambda name, shell: 1, names=[HostName("c"), HostName("a")])) == ["c", "a"]


def test_hosts_are_worked_on_at_once() -> None:
    meet = threading.Barrier(3, timeout=10)
    assert all(
        outcome.ok for outcome in three().each(lambda name, shell: meet.wait()).values() if outcome.error is None
    )
    assert meet.n_waiting == 0


def test_a_mistake_of_ours_is_not_an_outcome() -> None:
    def wrong(name: HostName, shell: Shell) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError):
        three().each(wrong)


def test_after_ctrl_c_unfinished_hosts_are_closed() -> None:
    fleet = three()
    started = threading.Event()

    def work(name: HostName, shell: Shell) -> None:
        if name == "b":
            with shell.tail("/never") as tail:
                started.set()
                tail.read()

    def interrupt() -> None:
        started.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fleet.each(work)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert fleet.shells[HostName("a")].run(["echo", "x"]).stdout == b"x\n"
    with pytest.raises(HostUnreachable, match="closed"):
        fleet.shells[HostName("b")].run(["true"])


def test_a_local_host_needs_no_ssh() -> None:
    with Fleet.connect(cluster(HostSpec(address="local", name="here"))) as fleet:
        assert fleet.shells[HostName("here")].run(["echo", "x"]).stdout == b"x\n"
        assert fleet.failed == {}


def test_hosts_are_reached_side_by_side_and_failures_are_distinguished(lab: Any) -> None:
    good, stranger = lab.sshd("127.0.0.2"), lab.sshd("127.0.0.3")
    lab.know(good)
    spec = cluster(
        HostSpec(address="127.0.0.2", name="good", port=good.port),
        HostSpec(address="127.0.0.3", name="stranger", port=stranger.port),
        HostSpec(address="no-such-host.invalid", name="nowhere"),
    )
    with Fleet.connect(spec, config=lab.config) as fleet:
        assert list(fleet.shells) == ["good"]
        assert {name: type(error) for name, error in fleet.failed.items()} == {
            "stranger": HostKeyUnknown,
            "nowhere": HostUnreachable,
        }
        assert fleet.shells[HostName("good")].run(["echo", "x"]).stdout == b"x\n"


def test_only_the_named_hosts_are_reached(lab: Any) -> None:
    server = lab.sshd()
    lab.know(server)
    spec = cluster(HostSpec(address="127.0.0.2", name="a", port=server.port), HostSpec(address="127.0.0.9", name="b"))
    with Fleet.connect(spec, config=lab.config, names=[HostName("a")]) as fleet:
        assert (list(fleet.shells), fleet.failed) == (["a"], {})


def test_many_hosts_behind_one_jump_host_log_in_a_few_at_a_time(lab: Any, tmp_path: Path) -> None:
    """With sshd's own MaxStartups on the jump host; each host has a connection of its own through it."""
    jump, server = lab.sshd("127.0.0.3"), lab.sshd("127.0.0.4")
    text = (jump.folder / "sshd_config").read_text().replace("MaxStartups 100\n", "MaxStartups 10:30:100\n")
    jump.stop()
    (jump.folder / "sshd_config").write_text(text)
    jump.log = (jump.folder / "sshd.log").open("ab")
    jump.start()
    lab.know(jump, server)
    lab.configure(f"Host bastion\n  HostName 127.0.0.3\n  Port {jump.port}\n")
    count = 3 * AT_ONE_SSHD
    hosts = [HostSpec(address="127.0.0.4", name=f"n{index}", port=server.port) for index in range(count)]
    with Fleet.connect(cluster(*hosts, proxy_jump="bastion"), forks=32, config=lab.config) as fleet:
        assert fleet.failed == {}
        outcomes = fleet.each(lambda name, shell: shell.run(["echo", name]).stdout.decode().strip())
        assert [outcome.value for outcome in outcomes.values()] == [f"n{index}" for index in range(count)]
    assert "drop connection" not in (jump.folder / "sshd.log").read_text()


def test_a_host_that_does_not_answer_costs_the_others_nothing(lab: Any) -> None:
    import socket

    server = lab.sshd()
    lab.know(server)
    with socket.socket() as mute:
        mute.bind(("127.0.0.3", 0))
        mute.listen()
        spec = cluster(
            HostSpec(address="127.0.0.3", name="mute", port=mute.getsockname()[1]),
            HostSpec(address="127.0.0.2", name="good", port=server.port),
            connect_timeout=1.0,
        )
        began = time.monotonic()
        with Fleet.connect(spec, config=lab.config) as fleet:
            assert time.monotonic() - began < 5
            assert list(fleet.shells) == ["good"]
            failed: PsctlError = fleet.failed[HostName("mute")]
            assert "no SSH answer in 1 s" in failed.message


def test_a_fleet_of_this_machine_loads_no_ssh_library() -> None:
    code = (
        "import sys\nfrom psctl.remote.fleet import Fleet\nfrom psctl.spec.cluster import local_cluster\n"
        "fleet = Fleet.connect(local_cluster())\nassert fleet.shells\n"
        "print([name for name in ('paramiko', 'torch') if name in sys.modules])\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_a_lent_fleet_has_the_asked_hosts_and_leaves_their_connections_open() -> None:
    fleet = three()
    with fleet.lend([HostName("a"), HostName("d")]) as lent:
        outcomes = lent.each(lambda name, shell: 1)
        assert {name: outcome.ok for name, outcome in outcomes.items()} == {"a": True, "d": False}
    assert list(fleet.lend().each(lambda name, shell: 1)) == ["a", "b", "c", "d"]
    assert fleet.shell("a").run(["echo", "open"]).stdout == b"open\n"
    fleet.close()
    with pytest.raises(HostUnreachable, match="closed"):
        fleet.shell("a").run(["echo", "open"])
