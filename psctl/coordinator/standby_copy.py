"""The copy of the coordinator's state on the standby, and the configurations that agents accept: the leader's end.

The decisions are in replication.py. This module sends and waits: the main thread hands over snapshots and records, and
waits until what follows from them may be carried out; answers of agents come on the threads of their connections.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from psctl.coordinator.replication import Replication
from psctl.errors import HostUnreachable
from psctl.job.leadership_messages import (
    AgentAddress,
    Leadership,
    LeadershipAccepted,
    MajorityMissed,
    ReplicaBegin,
    ReplicaLog,
    ReplicaRecord,
    ReplicaSnapshot,
    ReplicaStored,
)
from psctl.job.message import JobMessage
from psctl.transport.peer_connection import PeerConnection
from psctl.types import Address, Member

PART = 1 << 20
"""Bytes of one message of a copy."""

SLOW = 2.0
"""Seconds for the standby to store a record, after which the job goes on without it."""

AGAIN = 0.5
"""Seconds after which a configuration that was not accepted is sent again."""

PAUSE = 10.0
"""Seconds after a lost copy before the next one begins."""

MISSED = 3.0
"""Seconds without a majority after which the leader's agent looks for another leader."""

LOOK = 0.1
"""Seconds between two looks while waiting."""


class StandbyCopy:
    """Sends the state to the standby. `begin` and `append` take what the journal writes (journal.JournalCopy).

    Args:
        core: decides.
        log: path of the event log.
        authority_key: PEM, which a successor needs.
        peer: returns the connection of a member.
        patience: seconds for which a majority is waited for.
    """

    def __init__(
        self, core: Replication, log: Path, authority_key: str, peer: Callable[[Member], PeerConnection | None],
        patience: float,
    ) -> None:  # fmt: skip
        self._core, self._log, self._key, self._peer, self._patience = core, log, authority_key, peer, patience
        self._changed = threading.Condition()
        self._addresses: dict[int, Address] = {}
        self._known: dict[int, tuple[int, int]] = {}  # the age of the configuration that an agent has accepted
        self._sent: dict[int, tuple[PeerConnection, tuple[int, int], float]] = {}  # what it was sent last, and when
        self._target: PeerConnection | None = None  # of the copy
        self._logged = 0  # bytes of the event log that were sent
        self._streams = False  # the snapshot was sent, and records follow
        self._failed = False  # the copy cannot be stored
        self._next_copy_at = 0.0

    # ---- the journal, on the main thread ---------------------------------------------------------------------------

    def begin(self, number: int, snapshot: bytes) -> None:
        """Send a framed snapshot, which begins a journal."""
        if self._target is None or not self._is_log_sent():
            return
        with self._changed:
            sequence = self._core.next_record() if self._streams else 0
            self._streams = True
            copy = self._core.copy
        for data, whole in _parts(snapshot):
            self._target.send(ReplicaSnapshot(copy, sequence, whole, number), data, urgent=True)

    def append(self, record: bytes) -> None:
        """Send a framed record, and before it what the event log has by now."""
        if self._target is None or not self._streams:
            return
        for data in self._new_log(1 << 62):
            self._target.send(ReplicaLog(self._core.copy), data, urgent=True)
        with self._changed:
            sequence = self._core.next_record()
        for data, whole in _parts(record):
            self._target.send(ReplicaRecord(self._core.copy, sequence, whole), data, urgent=True)

    def wait(self) -> float:
        """Wait until what follows from the last record may be carried out; return for how long it took, in seconds.

        Raises:
            HostUnreachable: neither the standby nor a majority of the hosts answered for the patience of the job.
        """
        with self._changed:
            if self._core.may_carry_out():
                return 0.0
            began, asked = time.monotonic(), 0.0
            while not self._changed.wait_for(self._core.may_carry_out, LOOK):
                now = time.monotonic()
                if self._is_copy_lost() or now - began >= SLOW:
                    self._drop()
                self._send_newest(now)
                if now - began >= MISSED and now - asked >= 1.0:
                    asked = now
                    self._send_own(MajorityMissed())
                if now - began >= self._patience:
                    raise HostUnreachable(
                        f"most hosts of the job did not answer for {self._patience:.0f} s: {self._missing()}",
                        hint="restart.wait in the job file limits how long a job waits for hosts",
                    )
            return time.monotonic() - began

    # ---- now and then, on the main thread --------------------------------------------------------------------------

    def maintain(self, hosts: frozenset[int], make_snapshot: Callable[[], None], *, may_begin: bool) -> None:
        """Send configurations, drop a lost copy, and begin or continue one.

        Args:
            hosts: of the job that are not lost.
            make_snapshot: begins the journal anew.
            may_begin: a copy may begin now.
        """
        now = time.monotonic()
        with self._changed:
            if self._is_copy_lost():
                self._drop()
            committed = self._core.committed
            known = {host for host in hosts if host in committed.voters or self._known.get(host) == committed.age}
            self._core.change_voters(frozenset(known))  # a new voter has confirmed the one without it
            self._core.make_standby()
            if self._target is None and may_begin and now >= self._next_copy_at:
                self._begin_copy(hosts)
            self._send_newest(now)
        target = self._target
        if target is not None and not self._streams and target.pending() <= PART:
            for data in self._new_log(PART):
                target.send(ReplicaLog(self._core.copy), data, urgent=True)
            if self._is_log_sent():
                make_snapshot()

    def _begin_copy(self, hosts: frozenset[int]) -> None:
        for host in sorted(hosts - {self._core.committed.leader}):
            peer = self._peer(Member("agent", host))
            if peer is not None and host in self._addresses and self._core.may_copy_to(host):
                copy = self._core.begin_copy(host)
                self._target, self._logged, self._streams, self._failed = peer, 0, False, False
                peer.send(ReplicaBegin(copy, self._key), urgent=True)
                return

    def _is_copy_lost(self) -> bool:
        if self._target is None:
            return False
        return self._failed or self._peer(self._target.member) is not self._target

    def _drop(self) -> None:
        self._core.drop_standby()
        if self._target is not None:
            self._target, self._streams = None, False
            self._next_copy_at = time.monotonic() + PAUSE

    def _send_newest(self, now: float) -> None:
        """Send the newest configuration to each agent that has not accepted it: the leader's own first."""
        newest = self._core.newest
        own = newest.leader
        hosts = self._addresses if self._core.proposed is None or self._known.get(own) == newest.age else [own]
        message = Leadership(newest, self._core.committed, self._list())
        for host in hosts:
            peer = self._peer(Member("agent", host))
            if peer is None or self._known.get(host) == newest.age:
                continue
            sent = self._sent.get(host)
            if sent is None or sent[:2] != (peer, newest.age) or now - sent[2] >= AGAIN:
                self._sent[host] = (peer, newest.age, now)
                peer.send(message, urgent=True)

    def _list(self) -> tuple[AgentAddress, ...]:
        return tuple(AgentAddress(host, address) for host, address in sorted(self._addresses.items()))

    def _send_own(self, message: JobMessage) -> None:
        peer = self._peer(Member("agent", self._core.committed.leader))
        if peer is not None:
            peer.send(message, urgent=True)

    def _missing(self) -> str:
        age = self._core.newest.age
        waited = [host for host in self._core.newest.voters if self._known.get(host) != age]
        return f"hosts {', '.join(map(str, waited))}"

    def _new_log(self, most: int) -> Iterator[bytes]:
        """Yield what the event log has beyond what was sent, in parts, about `most` bytes at most."""
        with self._log.open("rb") as file:
            file.seek(self._logged)
            until = self._logged + most
            while self._logged < until and (data := file.read(PART)):
                self._logged += len(data)
                yield data

    def _is_log_sent(self) -> bool:
        return self._streams or self._logged >= os.stat(self._log).st_size

    # ---- the threads of agents' connections ------------------------------------------------------------------------

    def on_registered(self, host: int, address: Address | None) -> None:
        """An agent has connected, and listens for other agents at this address."""
        with self._changed:
            if address is not None:
                self._addresses[host] = address
            self._known.pop(host, None)

    def on_message(self, host: int, message: LeadershipAccepted | ReplicaStored) -> None:
        """An agent has accepted a configuration, or stored a record."""
        with self._changed:
            if isinstance(message, LeadershipAccepted):
                self._known[host] = (message.term, message.version)
                self._core.accepted_by(host, message.term, message.version)
                self._send_newest(time.monotonic())
            elif message.problem:
                self._failed = self._failed or (host, message.copy) == (self._core.copy_to, self._core.copy)
            else:
                self._core.stored_by(host, message.copy, message.sequence)
            self._changed.notify_all()


def _parts(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield parts of PART bytes, and whether each is the last one."""
    for at in range(0, len(data), PART):
        yield data[at : at + PART], at + PART >= len(data)
