"""Certificates expire: an expired one opens no connection, and a process that got another one continues."""

from __future__ import annotations

import ssl
import time
from typing import Any

import pytest

from psctl.errors import ProtocolError
from psctl.transport.protocol.authority import DAY, LIFE, Pair, issue
from psctl.types import Member

WORKER = Member("worker", 3)


def worker_until(pair: Any, life: float) -> tuple[Any, Pair]:
    """Credentials of a worker whose certificate is valid for `life` seconds from now on, and a fresh pair for it."""
    mine = pair.job.credentials(WORKER)
    short = issue(pair.job.authority, pair.job.name, WORKER, time.time(), life)
    mine.renew(short.certificate_pem, short.key_pem)
    return mine, issue(pair.job.authority, pair.job.name, WORKER, time.time())


def test_a_certificate_that_is_over_is_refused_and_its_successor_is_not(pair: Any) -> None:
    acceptor = pair.accept()
    mine, fresh = worker_until(pair, -10.0)
    with pytest.raises(ProtocolError):
        pair.dial(acceptor, mine)
    assert "expired" in pair.refused.get(timeout=10)
    mine.renew(fresh.certificate_pem, fresh.key_pem)
    pair.dial(acceptor, mine)
    pair.worker.next("joined")
    assert pair.server.next("joined")[0].member == WORKER


def test_the_end_that_is_dialled_uses_a_new_one_too(pair: Any) -> None:
    server = pair.job.credentials(Member("server", 0))
    over = issue(pair.job.authority, pair.job.name, server.member, time.time(), -10.0)
    acceptor = pair.accept(server)
    server.renew(over.certificate_pem, over.key_pem)
    with pytest.raises(ProtocolError):
        pair.dial(acceptor)
    fresh = issue(pair.job.authority, pair.job.name, server.member, time.time())
    server.renew(fresh.certificate_pem, fresh.key_pem)
    pair.dial(acceptor)
    pair.worker.next("joined")


def test_damaged_texts_change_nothing(pair: Any) -> None:
    acceptor = pair.accept()
    mine, fresh = worker_until(pair, LIFE)
    for certificate, key in (("x", "y"), (fresh.certificate_pem, mine.key)):
        with pytest.raises(ssl.SSLError):
            mine.renew(certificate, key)
    pair.dial(acceptor, mine)
    pair.worker.next("joined")


def test_a_members_certificate_is_valid_for_days() -> None:
    assert 2 * DAY < LIFE <= 14 * DAY
