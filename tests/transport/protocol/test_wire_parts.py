"""The small parts of wire/: certificates, seals, the state table, the receive buffer, the outbox."""

from __future__ import annotations

import time

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from psctl.errors import ProtocolError
from psctl.transport.protocol.authority import LIFE, issue, make_authority, read_identity
from psctl.transport.protocol.connection import TABLE, ConnectionState, Ours, Theirs, after
from psctl.transport.protocol.frames import CONTROL, FIRST, MESSAGE, PIECE, TAG, Cipher, derive
from psctl.transport.protocol.message_assembly import ReceiveBuffer
from psctl.transport.protocol.send_queue import NOTHING, SendQueue
from psctl.types import Member


def der(pem: str) -> bytes:
    return x509.load_pem_x509_certificate(pem.encode()).public_bytes(Encoding.DER)


@pytest.mark.parametrize("job", ["digits-1", "a/b c-2", "ünï-3", "x" * 200 + "-1"])
def test_a_certificate_names_job_role_rank_and_incarnation(job: str) -> None:
    authority = make_authority(job, time.time())
    member = Member("worker", 12, 3)
    assert read_identity(der(issue(authority, job, member, time.time()).certificate_pem)) == (job, member)


def test_the_authoritys_own_certificate_has_no_identity() -> None:
    with pytest.raises(ProtocolError, match=r"names no member of a job \(its URIs: psctl://digits-1"):
        read_identity(der(make_authority("digits-1", time.time()).certificate_pem))
    with pytest.raises(ProtocolError, match="names no member of a job"):
        read_identity(b"garbage")


def test_a_certificate_is_valid_from_a_day_before_for_its_life() -> None:
    now = 1_800_000_000.0
    pair = issue(make_authority("j-1", now), "j-1", Member("agent", 0), now)
    certificate = x509.load_pem_x509_certificate(pair.certificate_pem.encode())
    assert certificate.not_valid_before_utc.timestamp() == now - 86400
    assert certificate.not_valid_after_utc.timestamp() == now + LIFE


def test_a_key_is_bound_to_job_members_and_connection() -> None:
    a, b = Member("worker", 0), Member("server", 0)
    key, identity = bytes(32), bytes(32)
    secrets = {
        derive(key, "j-1", a, b, identity),
        derive(key, "j-2", a, b, identity),
        derive(key, "j-1", b, a, identity),
        derive(key, "j-1", Member("worker", 0, 1), b, identity),
        derive(key, "j-1", a, b, b"1" * 32),
    }
    assert len(secrets) == 5


def sealed(cipher: Cipher, data: bytes, associated: bytes = b"") -> bytes:
    out = bytearray(len(data) + TAG)
    cipher.seal(data, associated, memoryview(out))
    return bytes(out)


def test_seals_open_in_order_and_only_with_their_associated_data() -> None:
    ours, theirs = Cipher(bytes(32)), Cipher(bytes(32))
    for text in (b"one", b"two"):
        out = bytearray(3)
        theirs.open(sealed(ours, text, b"with"), b"with", memoryview(out))
        assert out == text
    with pytest.raises(ProtocolError, match="fails its check"):
        theirs.open(sealed(ours, b"three", b"with"), b"without", memoryview(bytearray(5)))


def test_the_same_words_never_look_the_same_also_across_the_change_of_keys() -> None:
    cipher = Cipher(bytes(32), rekey=3)
    assert len({sealed(cipher, b"the same words") for _ in range(20)}) == 20


def test_the_table_lets_nothing_out_of_the_end_and_everything_into_it() -> None:
    for state in ConnectionState:
        assert after(state, Theirs.FAULT) is ConnectionState.ENDED
        assert after(state, Theirs.END) is ConnectionState.ENDED
    assert {target for (state, _), target in TABLE.items() if state is ConnectionState.ENDED} == {ConnectionState.ENDED}


def test_what_is_not_in_the_table_is_the_peers_fault_or_our_bug() -> None:
    with pytest.raises(ProtocolError, match="it sent keys while the connection was open"):
        after(ConnectionState.OPEN, Theirs.KEYS)
    with pytest.raises(AssertionError, match="this end may not do this now: accept while in the TLS handshake"):
        after(ConnectionState.HANDSHAKE, Ours.ACCEPT)


def test_every_state_can_be_reached() -> None:
    reached = {ConnectionState.HANDSHAKE}
    while more := {target for (state, _), target in TABLE.items() if state in reached} - reached:
        reached |= more
    assert reached == set(ConnectionState)


@given(parts=st.lists(st.binary(min_size=1, max_size=5000), max_size=30), reads=st.lists(st.integers(1, 9000)))
def test_the_buffer_gives_back_what_was_put_in(parts: list[bytes], reads: list[int]) -> None:
    buffer, got = ReceiveBuffer(), b""
    for number, part in enumerate(parts):
        while part:
            room = buffer.space(len(buffer) + 1 + number * 4000)
            count = min(len(room), len(part))
            room[:count] = part[:count]
            buffer.add_received(count)
            part = part[count:]
        take = min(len(buffer), reads[number] if number < len(reads) else 0)
        got += bytes(buffer.data[:take])
        buffer.mark_read(take)
    assert got + bytes(buffer.data) == b"".join(parts)


def filled(window: int, *payloads: int, urgent: bool = False) -> SendQueue:
    outbox = SendQueue(window)
    for number, size in enumerate(payloads):
        outbox.add(f"{number}", b"head", memoryview(bytes(size)), urgent=urgent)
    return outbox


def test_small_messages_are_written_together_and_large_ones_alone() -> None:
    outbox = filled(4 << 20, *[100] * 50, 512 << 10, 512 << 10, 10)
    assert [len(outbox.take()) for _ in range(3)] == [51, 1, 1]


def test_no_more_is_taken_than_the_credit_allows() -> None:
    outbox = filled(32 << 10, *[8_000] * 5)
    taken = outbox.take()
    assert [frame.message for frame in taken] == ["0", "1", "2"]
    assert not outbox.take()
    assert not outbox.is_ready()
    outbox.add_credit(taken[0].cost)
    assert [frame.message for frame in outbox.take()] == ["3"]
    assert outbox.pending == 8_000 + 4 + 9 + TAG


def test_credit_for_what_was_never_sent_is_a_fault() -> None:
    outbox = filled(32 << 10, 1000)
    for count in (1, 0, -1):
        with pytest.raises(ProtocolError, match="more than it can have read"):
            outbox.add_credit(count)
        outbox = filled(32 << 10, 1000)
        cost = outbox.take()[0].cost
        outbox.add_credit(cost)


def test_our_own_debt_goes_first_and_costs_nothing() -> None:
    outbox = filled(32 << 10, 20_000, 20_000)
    outbox.take()
    outbox.owe_credit(500)
    outbox.owe_credit(70)
    (frame,) = outbox.take()
    assert frame.kind == CONTROL
    assert msgspec.msgpack.decode(frame.header) == {"type": "Credit", "bytes": 570}
    assert frame.cost == 0


def test_pieces_of_one_message_stay_together() -> None:
    outbox = filled(32 << 10, 45_000, 10)
    first = outbox.take()
    assert [frame.kind for frame in first] == [FIRST, PIECE, PIECE], "as much as the window takes"
    outbox.add("urgent", b"head", memoryview(bytes(9000)), urgent=True)
    outbox.add("short", b"head", NOTHING, urgent=True)
    outbox.add_credit(sum(frame.cost for frame in first))
    rest = outbox.take()
    outbox.add_credit(sum(frame.cost for frame in rest))
    rest += outbox.take()
    found = [(frame.kind, frame.message) for frame in rest]
    assert found[:3] == [(PIECE, None), (PIECE, None), (PIECE, "0")], "something urgent that is long itself waits"
    assert found[3:] == [(FIRST, None), (PIECE, "urgent"), (MESSAGE, "short"), (MESSAGE, "1")]


def test_what_is_urgent_and_whole_goes_between_pieces() -> None:
    outbox = filled(32 << 10, 45_000)
    first = outbox.take()
    outbox.add("urgent", b"head", NOTHING, urgent=True)
    outbox.add_credit(sum(frame.cost for frame in first))
    assert [(frame.kind, frame.message) for frame in outbox.take()][:2] == [(MESSAGE, "urgent"), (PIECE, None)]


def test_a_header_of_more_than_one_frame_is_announced() -> None:
    outbox = SendQueue(1 << 20)
    outbox.add("0", bytes(300_000), memoryview(b"payload"), urgent=False)
    frames = [frame for _ in range(4) for frame in outbox.take()]
    assert [frame.kind for frame in frames] == [CONTROL, PIECE, PIECE, PIECE]
    assert (frames[-1].message, bytes(frames[-1].payload)) == ("0", b"payload")


@given(
    window=st.integers(16 << 10, 200_000),
    sizes=st.lists(st.integers(0, 300_000) | st.just(64 << 20), max_size=6),
)
def test_a_receiver_that_reads_never_leaves_a_sender_stuck_nor_is_it_overrun(window: int, sizes: list[int]) -> None:
    outbox = filled(window, *sizes)
    flying, read, half = 0, 0, window // 2
    while True:
        taken = outbox.take()
        flying += sum(frame.cost for frame in taken)
        assert flying <= window
        read += sum(frame.cost for frame in taken)
        if read >= half and read:
            outbox.add_credit(read)
            flying, read = flying - read, 0
        elif not taken:
            break
    assert outbox.pending == 0


def test_clearing_drops_everything() -> None:
    outbox = filled(32 << 10, 20_000, 20_000, 20_000)
    outbox.take()
    outbox.clear()
    assert outbox.pending == 0
    assert not outbox.is_ready()
