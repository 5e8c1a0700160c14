"""The leader's copy of its state: nothing is carried out that the standby lacks, and a slow standby is left behind."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from psctl.coordinator import standby_copy
from psctl.coordinator.replication import Replication
from psctl.coordinator.standby_copy import StandbyCopy
from psctl.errors import HostUnreachable
from psctl.job.leadership_messages import (
    Configuration,
    Leadership,
    LeadershipAccepted,
    MajorityMissed,
    ReplicaLog,
    ReplicaRecord,
    ReplicaSnapshot,
    ReplicaStored,
)
from psctl.types import Address, Member
from tests.helpers.running import until

FIRST = Configuration(voters=(0, 1, 2))


class FakePeer:
    """A connection to an agent, which answers as a test says."""

    def __init__(self, copy: StandbyCopy, host: int) -> None:
        self.copy, self.host, self.member = copy, host, Member("agent", host)
        self.accepts = self.stores = True
        self.sent: list[tuple[Any, bytes]] = []

    def send(self, message: Any, payload: bytes = b"", *, urgent: bool = False) -> bool:
        assert urgent, "the order of all messages matters"
        self.sent.append((message, bytes(payload)))
        if isinstance(message, Leadership) and self.accepts:
            age = message.configuration.age
            self._later(LeadershipAccepted(*age))
        if isinstance(message, ReplicaSnapshot | ReplicaRecord) and message.whole and self.stores:
            self._later(ReplicaStored(message.copy, message.sequence))
        return True

    def _later(self, answer: Any) -> None:
        threading.Thread(target=self.copy.on_message, args=(self.host, answer)).start()

    def pending(self) -> int:
        return 0


class Leader:
    """A leader with connections to three agents."""

    def __init__(self, folder: Path, patience: float = 30.0) -> None:
        self.log = folder / "events.jsonl"
        self.log.write_bytes(b"one\n")
        self.peers: dict[int, FakePeer] = {}
        self.core = Replication(FIRST, FIRST, is_successor=False)
        self.copy = StandbyCopy(self.core, self.log, "key", lambda member: self.peers.get(member.rank), patience)
        for host in range(3):
            self.peers[host] = FakePeer(self.copy, host)
            self.copy.on_registered(host, Address("127.0.0.1", 1000 + host))

    def maintain(self) -> None:
        self.copy.maintain(frozenset(range(3)), lambda: self.copy.begin(7, b"snapshot"), may_begin=True)

    def with_standby(self) -> Leader:
        until(lambda: self.maintain() or self.core.committed.standby == 1, 10)
        return self

    def payloads(self, kind: type) -> list[bytes]:
        return [data for message, data in self.peers[1].sent if isinstance(message, kind)]


def test_the_standby_gets_the_log_the_state_and_every_record(tmp_path: Path) -> None:
    leader = Leader(tmp_path).with_standby()
    with leader.log.open("ab") as file:
        file.write(b"two\n")
    leader.copy.append(b"record")
    leader.copy.wait()
    assert leader.payloads(ReplicaLog) == [b"one\n", b"two\n"]
    assert leader.payloads(ReplicaSnapshot) == [b"snapshot"]
    kinds = [type(message) for message, _ in leader.peers[1].sent]
    assert kinds[-2:] == [ReplicaLog, ReplicaRecord], "events before the record that follows them"


def test_nothing_is_carried_out_before_the_standby_has_stored_it(tmp_path: Path) -> None:
    leader = Leader(tmp_path).with_standby()
    leader.peers[1].stores = False
    leader.copy.append(b"record")
    done = threading.Event()
    threading.Thread(target=lambda: (leader.copy.wait(), done.set())).start()
    assert not done.wait(0.5)
    leader.copy.on_message(1, ReplicaStored(leader.core.copy, leader.core.sequence))
    assert done.wait(5)


@pytest.mark.parametrize("fault", ["slow", "disconnected", "full"])
def test_the_leader_goes_on_without_a_standby_that_a_majority_has_dropped(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_copy, "SLOW", 0.5)
    leader = Leader(tmp_path).with_standby()
    peer = leader.peers[1]
    peer.stores = peer.accepts = False
    if fault == "disconnected":
        del leader.peers[1]
    leader.copy.append(b"record")
    if fault == "full":
        leader.copy.on_message(1, ReplicaStored(leader.core.copy, 0, "no space left on device"))
    leader.copy.wait()
    assert leader.core.committed.standby is None
    leader.copy.append(b"another")
    assert leader.copy.wait() == 0.0


def test_without_standby_and_majority_nothing_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLOW", "MISSED"):
        monkeypatch.setattr(standby_copy, name, 0.2)
    leader = Leader(tmp_path, patience=2.0).with_standby()
    for host in (1, 2):
        leader.peers[host].stores = leader.peers[host].accepts = False
    leader.copy.append(b"record")
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match=r"most hosts of the job did not answer for 2 s: hosts 1, 2"):
        leader.copy.wait()
    assert time.monotonic() - began >= 2.0
    assert MajorityMissed() in [message for message, _ in leader.peers[0].sent], "its agent looks for another leader"


def test_a_standby_that_comes_back_gets_a_whole_new_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_copy, "PAUSE", 0.0)
    leader = Leader(tmp_path).with_standby()
    leader.peers[1].stores = leader.peers[1].accepts = False
    leader.peers[1] = FakePeer(leader.copy, 1)  # another connection
    leader.copy.on_registered(1, Address("127.0.0.1", 1))
    leader.copy.append(b"record")
    leader.copy.wait()
    assert leader.payloads(ReplicaRecord) == []
    leader.with_standby()
    assert leader.payloads(ReplicaSnapshot) == [b"snapshot"]
    assert leader.payloads(ReplicaLog) == [b"one\n"]


def test_a_successor_carries_nothing_out_before_a_majority_knows_it(tmp_path: Path) -> None:
    leader = Leader(tmp_path)
    leader.core = Replication(FIRST, Configuration(0, 4, 0, 2, (0, 1, 2)), is_successor=True)
    leader.copy = StandbyCopy(leader.core, leader.log, "key", lambda member: leader.peers.get(member.rank), 30.0)
    assert not leader.core.may_carry_out(), "host 2 may be elected"
    for peer in leader.peers.values():
        peer.copy = leader.copy
        leader.copy.on_registered(peer.host, Address("127.0.0.1", 1))
    leader.copy.append(b"record")
    leader.copy.wait()
    assert leader.core.committed.age == (0, 5)
    assert leader.core.committed.standby is None
