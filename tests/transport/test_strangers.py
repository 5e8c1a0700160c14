"""Who may connect and who may not: every refusal has a reason, ends that connection alone, and costs little memory."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import re
import socket
import ssl
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from psctl.errors import PeerLost, ProtocolError
from psctl.transport.connect import dial
from psctl.transport.credentials import make_context
from psctl.transport.preauth_listener import MOST, PreauthListener, send_preauth_answer
from psctl.transport.protocol import preauth
from psctl.transport.protocol.message_assembly import ReceiveBuffer
from psctl.transport.protocol.tls_records import Records
from psctl.transport.tcp_stream import listen
from psctl.types import Address, Member


def works(pair: Any, acceptor: Any, note: Any) -> None:
    """The acceptor still takes in those who belong."""
    peer = pair.dial(acceptor)
    pair.worker.next("joined")
    theirs, _ = pair.server.next("joined")
    peer.send(note("hello"))
    pair.server.next("received")
    peer.close("done")
    pair.worker.next("lost")
    pair.server.next("lost")
    assert theirs.join(10)


def test_a_member_of_another_job_is_refused(pair: Any, other_job: Any, note: Any) -> None:
    acceptor = pair.accept()
    stranger = other_job.credentials(Member("worker", 0))
    with pytest.raises(
        PeerLost,
        match=r"server/0 at .*the connection ended after our proof of the job.s secret: .* another job",
    ):
        pair.dial(acceptor, stranger)
    assert "it did not prove this job's secret: it is not a process of this job" in pair.refused.get(timeout=10)
    works(pair, acceptor, note)


def test_another_jobs_certificate_is_refused_with_the_right_preauth_too(pair: Any, other_job: Any, note: Any) -> None:
    acceptor = pair.accept()
    stranger = replace(other_job.credentials(Member("worker", 0)), preauth_secret=pair.job.preauth_secret)
    with pytest.raises(ProtocolError, match=r"server/0 at .*certificate is not of this job's authority"):
        pair.dial(acceptor, stranger)
    trusting = replace(stranger, job="digits-1", authority=pair.job.authority.certificate_pem)
    with pytest.raises(ProtocolError, match=r"server/0 at .*it refused our certificate or our TLS"):
        pair.dial(acceptor, trusting)
    told = [pair.refused.get(timeout=10), pair.refused.get(timeout=10)]
    assert any("certificate is not of this job's authority" in reason for reason in told), told
    works(pair, acceptor, note)


def test_one_authority_with_two_jobs_still_distinguishes_them(pair: Any, note: Any) -> None:
    acceptor = pair.accept()
    pair.job.name = "digits-2"
    try:
        stranger = pair.job.credentials(Member("worker", 0))
    finally:
        pair.job.name = "digits-1"
    with pytest.raises(ProtocolError, match="it belongs to job digits-1, not to digits-2"):
        pair.dial(acceptor, stranger)
    works(pair, acceptor, note)


def test_a_refused_member_gets_the_reason(pair: Any, note: Any) -> None:
    newest = {"worker/3": 2}

    def allow(member: Member) -> str | None:
        if member.incarnation < newest.get(str(member), 0):
            return f"incarnation {member.incarnation} of {member} is older than {newest[str(member)]}"
        return None

    acceptor = pair.accept(allow=allow)
    with pytest.raises(ProtocolError, match="it refused us: incarnation 1 of worker/3 is older than 2"):
        pair.dial(acceptor, pair.job.credentials(Member("worker", 3, 1)))
    assert "refused: incarnation 1 of worker/3 is older than 2" in pair.refused.get(timeout=10)
    pair.dial(acceptor, pair.job.credentials(Member("worker", 3, 2)))
    pair.worker.next("joined")
    assert pair.server.next("joined")[0].member == Member("worker", 3, 2)


@pytest.mark.parametrize(
    ("expect", "reason"),
    [
        (Member("server", 1), "expected server/1, found server/0"),
        (Member("server", 0, 4), "expected incarnation 4 of server/0, found 0"),
        ("coordinator", "expected a coordinator, found server/0"),
    ],
)
def test_a_peer_with_another_identity_than_expected_is_refused(pair: Any, expect: Any, reason: str) -> None:
    acceptor = pair.accept()
    with pytest.raises(ProtocolError, match=reason):
        pair.dial(acceptor, expect=expect)
    assert f"it refused us: {reason}" in pair.refused.get(timeout=10)


def test_a_role_may_be_expected(pair: Any) -> None:
    assert pair.dial(pair.accept(), expect="server").member == Member("server", 0)
    pair.worker.next("joined")
    pair.server.next("joined")


def test_an_address_without_a_listener_is_named(pair: Any) -> None:
    acceptor = pair.accept()
    acceptor.close()
    with pytest.raises(PeerLost, match=r"server/0 at .*: Connection refused"):
        pair.dial(acceptor)


def raw(pair: Any, address: Address) -> Any:
    """A stream of a stranger."""
    from psctl.transport import tcp_stream

    return pair.network.connect(address) if pair.kind == "memory" else tcp_stream.connect(address, 5)


def hear(stream: Any, count: int) -> bytes:
    """Read so many bytes, less at the end."""
    heard = bytearray(count)
    have = 0
    stream.limit(10)
    with contextlib.suppress(ConnectionResetError):
        while have < count and (some := stream.receive_into(memoryview(heard)[have:])):
            have += some
    return bytes(heard[:have])


def preauthenticated(pair: Any, address: Address) -> Any:
    """A stream of one who has the job's secret, and nothing else."""
    stream = raw(pair, address)
    send_preauth_answer(stream, pair.job.preauth_secret, time.monotonic() + 10)
    return stream


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(1000),
    "a huge record": b"\x16\x03\x01\xff\xff" + bytes(1000),
    "a record of nonsense": b"\x16\x03\x01\x00\x10" + bytes(16),
    "noise": bytes(range(255, 0, -1)) * 300,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_instead_of_a_preauth_answer_ends_that_connection_only(pair: Any, note: Any, garbage: bytes) -> None:
    acceptor = pair.accept()
    stranger = raw(pair, acceptor.address)
    hear(stranger, preauth.GREETING)
    stranger.send(memoryview(garbage[: preauth.ANSWER]))
    if len(garbage) < preauth.ANSWER:
        stranger.shutdown()
    assert re.search("did not prove this job's secret|before it proved this job's secret", pair.refused.get(timeout=10))
    stranger.close()
    works(pair, acceptor, note)


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_instead_of_tls_ends_that_connection_only(pair: Any, note: Any, garbage: bytes) -> None:
    acceptor = pair.accept()
    stranger = preauthenticated(pair, acceptor.address)
    stranger.send(memoryview(garbage))
    reason = pair.refused.get(timeout=10)
    assert "it does not speak TLS" in reason or "the TLS handshake failed" in reason
    stranger.close()
    works(pair, acceptor, note)


def test_a_peer_that_never_ends_its_handshake_is_disconnected(memory_pair: Any, note: Any) -> None:
    acceptor = memory_pair.accept()
    stranger = preauthenticated(memory_pair, acceptor.address)
    record = b"\x16\x03\x01\x40\x00" + b"\x01\x00\xff\xff" + bytes((1 << 14) - 4)  # one of four parts of a ClientHello
    with pytest.raises(ConnectionError):  # noqa: PT012
        for _ in range(10_000):
            stranger.send(memoryview(record))
    reason = memory_pair.refused.get(timeout=10)
    assert "TLS handshake failed" in reason or "before its certificate" in reason
    works(memory_pair, acceptor, note)


def test_one_without_a_certificate_is_refused(memory_pair: Any, note: Any) -> None:
    acceptor = memory_pair.accept()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=memory_pair.job.authority.certificate_pem)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing)
    stranger = preauthenticated(memory_pair, acceptor.address)
    buffer = memoryview(bytearray(1 << 16))
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    stranger.send(memoryview(outgoing.read()))
    incoming.write(buffer[: stranger.receive_into(buffer)])
    session.do_handshake()
    stranger.send(memoryview(outgoing.read()))
    assert "it showed no certificate" in memory_pair.refused.get(timeout=10)
    stranger.close()
    works(memory_pair, acceptor, note)


def test_an_answer_that_was_overheard_answers_no_other_greeting(pair: Any, note: Any) -> None:
    acceptor = pair.accept()
    first, second = raw(pair, acceptor.address), raw(pair, acceptor.address)
    said = preauth.answer(pair.job.preauth_secret, hear(first, preauth.GREETING))
    hear(second, preauth.GREETING)
    second.send(memoryview(said))
    assert hear(second, 1) == b""
    assert "it did not prove this job's secret" in pair.refused.get(timeout=10)
    first.send(memoryview(said + b"no TLS"))  # in its own place it is right, and TLS is the next to be asked for
    assert "does not speak TLS" in pair.refused.get(timeout=10)
    for stranger in (first, second):
        stranger.close()
    works(pair, acceptor, note)


def test_a_preauth_answer_that_drips_is_let_in_within_the_deadline_and_not_after(pair: Any) -> None:
    acceptor = pair.accept(patience=0.4)
    quick, slow = raw(pair, acceptor.address), raw(pair, acceptor.address)
    for stranger in (quick, slow):
        said = preauth.answer(pair.job.preauth_secret, hear(stranger, preauth.GREETING))
        for byte in said[:-1]:
            stranger.send(memoryview(bytes([byte])))
        if stranger is quick:
            stranger.send(memoryview(said[-1:] + b"no TLS"))
    assert "does not speak TLS" in pair.refused.get(timeout=10)
    assert "no handshake within 0.4 s" in pair.refused.get(timeout=10)
    assert hear(slow, 1) == b""
    for stranger in (quick, slow):
        stranger.close()


def test_a_peer_without_preauth_costs_no_thread_and_no_buffer_and_blocks_no_other(pair: Any, note: Any) -> None:
    acceptor = pair.accept()
    gc.collect()
    before = sum(type(one) in (Records, ReceiveBuffer) for one in gc.get_objects())
    threads = threading.active_count()
    strangers = [raw(pair, acceptor.address) for _ in range(MOST + 40)]
    greeted = [hear(stranger, preauth.GREETING) for stranger in strangers]
    assert len(set(greeted)) == len(strangers), "each has a greeting of its own"
    assert threading.active_count() == threads
    assert sum(type(one) in (Records, ReceiveBuffer) for one in gc.get_objects()) == before
    told = [pair.refused.get(timeout=10) for _ in range(40)]
    assert all("it proved nothing and was dropped for newer connections" in reason for reason in told)
    begin = time.monotonic()
    works(pair, acceptor, note)
    assert time.monotonic() - begin < 3, "nobody waited for the deadline of another"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    ("said", "kind", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", ProtocolError, r"not a listener of psctl: it begins with b'SSH-2.0-OpenSSH_'"),
        (b"ps", PeerLost, "the connection ended before the greeting"),
        (b"psctl 1\n" + bytes(16), PeerLost, "the connection ended after our proof of the job.s secret"),
        (None, PeerLost, r"no handshake within 0.3 s"),
    ],
    ids=["another service", "an early end", "another job", "silence"],
)
def test_what_is_no_listener_of_ours_is_named(tcp_pair: Any, said: bytes | None, kind: Any, reason: str) -> None:
    who = tcp_pair.job.credentials(Member("worker", 0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address(*listening.getsockname())
        other: list[socket.socket] = []

        def serve() -> None:
            other.append(listening.accept()[0])
            if said is not None:
                other[0].sendall(said)
                other[0].shutdown(socket.SHUT_WR)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(kind, match=rf"^server/0 at 127.0.0.1:{address.port}: {reason}"):
            dial(address, who, Member("server", 0), int, tcp_pair.worker, timeout=0.3)
        serving.join(10)
        other[0].close()


def test_a_slow_unauthenticated_peer_has_a_deadline_however_often_it_sends(pair: Any, note: Any) -> None:
    acceptor = pair.accept(patience=0.3)
    silent, dripping = raw(pair, acceptor.address), raw(pair, acceptor.address)
    begin = time.monotonic()
    with pytest.raises(ConnectionError):  # noqa: PT012
        while time.monotonic() < begin + 5:
            dripping.send(memoryview(b"\x16"))
            dripping.limit(0.02)
            try:
                dripping.receive_into(memoryview(bytearray(1)))
            except TimeoutError:
                continue
            raise ConnectionError("the acceptor has ended it")
    assert time.monotonic() - begin < 4
    told = [pair.refused.get(timeout=10), pair.refused.get(timeout=10)]
    assert all("no handshake within 0.3 s" in reason for reason in told), told
    for stranger in (silent, dripping):
        stranger.close()


def test_many_slow_unauthenticated_peers_do_not_lock_out_members(memory_pair: Any, note: Any) -> None:
    acceptor = memory_pair.accept(half_open=4)
    strangers = [preauthenticated(memory_pair, acceptor.address) for _ in range(8)]
    begin = time.monotonic()
    works(memory_pair, acceptor, note)
    assert time.monotonic() - begin < 4.5, "the oldest strangers made room before their deadline"
    for stranger in strangers:
        stranger.close()


def test_closing_the_acceptor_ends_half_open_connections_and_leaves_peers_alone(pair: Any, note: Any) -> None:
    acceptor = pair.accept()
    mine = pair.dial(acceptor)
    pair.worker.next("joined")
    pair.server.next("joined")
    stranger, shaking = raw(pair, acceptor.address), preauthenticated(pair, acceptor.address)
    for line in (stranger, shaking):
        line.send(memoryview(b"\x16\x03"))
    hear(stranger, preauth.GREETING)
    acceptor.close()
    for line in (stranger, shaking):
        assert hear(line, 1) == b""
        line.close()
    mine.send(note("still here"))
    assert pair.server.next("received")[1][0].text == "still here"


def test_keys_touch_no_disk_and_no_descriptor_stays(job: Any) -> None:
    before = os.listdir("/proc/self/fd")
    mine = job.credentials(Member("worker", 0))
    context = make_context(mine.authority, mine.certificate, mine.key, accepting=True)
    assert context.num_tickets == 0
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert "PRIVATE" not in repr(mine)
    assert "PRIVATE" not in repr(job.authority)


def test_an_allow_that_raises_is_reported_and_harms_no_other_peer(memory_pair: Any, note: Any) -> None:
    def allow(member: Member) -> str | None:
        if member.rank == 9:
            raise KeyError("rank 9")
        return None

    acceptor = memory_pair.accept(allow=allow)
    with pytest.raises(PeerLost, match="server/0 at"):
        memory_pair.dial(acceptor, memory_pair.job.credentials(Member("worker", 9)))
    assert "our allow() failed: KeyError: 'rank 9'" in memory_pair.refused.get(timeout=10)
    works(memory_pair, acceptor, note)


def test_unauthenticated_peers_leave_no_memory_allocated(memory_pair: Any) -> None:
    """At once, not when the interpreter next looks for cycles: each would leave 130 kB until then."""
    acceptor = memory_pair.accept()
    gc.collect()
    before = sum(type(one) in (Records, ReceiveBuffer) for one in gc.get_objects())
    gc.disable()
    try:
        for number in range(20):
            stream = preauthenticated(memory_pair, acceptor.address)
            stream.send(memoryview(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"\x16\x03\x01\x00\x05hello"))
            memory_pair.refused.get(timeout=10)
            stream.close()
        after = sum(type(one) in (Records, ReceiveBuffer) for one in gc.get_objects())
    finally:
        gc.enable()
    assert after <= before + 8


def test_a_flood_from_one_address_makes_room_at_its_own_cost() -> None:
    listener = listen("127.0.0.1", None)
    dropped: queue.Queue[str] = queue.Queue()
    preauth_listener = PreauthListener(listener, "00" * 32, 20, lambda name, why: dropped.put(name), most=8)
    let_in: queue.Queue[str] = queue.Queue()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                stream = preauth_listener.accept()
                let_in.put(stream.name)
                stream.close()

    serving = threading.Thread(target=serve)
    serving.start()
    address = (listener.address.host, listener.address.port)
    with contextlib.ExitStack() as opened:
        members = []
        for _ in range(3):  # far away: they answer when the flood has long passed
            member = opened.enter_context(socket.create_connection(address, 10, source_address=("127.0.0.1", 0)))
            members.append((member, member.recv(preauth.GREETING, socket.MSG_WAITALL)))
        for _ in range(50):
            stranger = opened.enter_context(socket.create_connection(address, 10, source_address=("127.0.0.3", 0)))
            stranger.recv(1)
        gone = [dropped.get(timeout=10) for _ in range(45)]
        assert all(name.startswith("127.0.0.3:") for name in gone)
        for member, greeting in members:
            member.sendall(preauth.answer("00" * 32, greeting))
        assert all(let_in.get(timeout=10).startswith("127.0.0.1:") for _ in members)
        listener.close()
        serving.join()
        preauth_listener.clear()
