"""New certificates: when the coordinator issues them, and what a member does with one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from psctl.job.process_messages import NewCertificate
from psctl.job.training_messages import Go
from psctl.process.certificate_renewal import CertificateRenewer, Renewals
from psctl.transport.credentials import Credentials
from psctl.transport.protocol.authority import issue, make_authority
from psctl.transport.protocol.preauth import new_secret
from psctl.types import Member

AGENT, WORKER = Member("agent", 0), Member("worker", 1)


def test_half_of_a_life_is_left_when_a_certificate_is_due() -> None:
    renewals = Renewals(1000.0, 100.0)
    assert renewals.due([AGENT, WORKER], 1050.0) == []
    assert renewals.due([AGENT, WORKER], 1051.0) == [AGENT, WORKER], "issued by psctl, when the job began"
    renewals.issued(WORKER, 1051.0)
    assert renewals.due([AGENT, WORKER], 1060.0) == [AGENT]
    assert renewals.due([WORKER], 1102.0) == [WORKER], "and again"
    assert renewals.due([], 9e9) == [], "who is not connected is due when it is there again"


class Kept:
    """A handler that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_connected(self, peer: Any) -> None:
        self.told.append("joined")

    def receive_buffer_for(self, peer: Any, message: Any, size: int) -> memoryview | None:
        return memoryview(bytearray(size))

    def on_message(self, peer: Any, message: Any, payload: memoryview | None) -> None:
        self.told.append(message)

    def on_connection_lost(self, peer: Any, error: Any) -> None:
        self.told.append("lost")


def test_a_new_certificate_is_used_and_everything_else_is_handed_on(tmp_path: Path) -> None:
    authority, now = make_authority("digits-1", time.time()), time.time()
    pairs = [issue(authority, "digits-1", WORKER, now) for _ in range(2)]
    mine = Credentials(
        "digits-1", WORKER, authority.certificate_pem, pairs[0].certificate_pem, pairs[0].key_pem, new_secret()
    )
    before, inner, said = (mine.dialling, mine.accepting), Kept(), []
    renewing, peer = CertificateRenewer(mine, inner, said.append), object()
    renewing.on_connected(peer)  # type: ignore[arg-type]
    renewing.on_message(peer, NewCertificate(pairs[1].certificate_pem, pairs[1].key_pem), None)  # type: ignore[arg-type]
    renewing.on_message(peer, Go(), None)  # type: ignore[arg-type]
    assert inner.told == ["joined", Go()]
    assert mine.certificate == pairs[1].certificate_pem
    assert mine.dialling is not before[0] and mine.accepting is not before[1]
    assert len(said) == 1 and pairs[1].key_pem not in said[0]
